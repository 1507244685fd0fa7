"""Take back the newest tokens of a layer, as if they had never come."""

import torch
from torch import Tensor

from ..masks.padding import Padding
from ..table.rollback import order_without
from .layer_state import LayerState
from .scores import Scores


class Rollback:
    """Takes back held tokens, and moves the remaining ones.

    Args:
        state, scores: parts of the layer.
        padding: the pads of the batch.
    """

    def __init__(self, state: LayerState, scores: Scores, padding: Padding) -> None:
        self._state, self._scores, self._padding = state, scores, padding

    def check(self, count: int) -> None:
        """Check that the last `count` columns can be taken back; some column must remain.

        Raises:
            ValueError: some of these tokens have been evicted.
        """
        self._state.action.check_crop(count)
        order_without(self._state.known, count, self._tokens_among(count), self._pads_without(count))

    def remove(self, count: int) -> None:
        """Take back the last `count` columns; some column must remain.

        Raises:
            ValueError: see `check`.
        """
        pads = self._pads_without(count)
        order = order_without(self._state.known, count, self._tokens_among(count), pads)
        self._scores.encode()
        self._state.move(order, count, pads)

    def sort_pads(self) -> bool:
        """Move pads in the middle of the text to the lowest slots, if the next token takes the last free slot.

        Returns:
            Whether anything was moved.
        """
        table = self._state.known
        if table.held + 1 != table.capacity:
            return False
        self._scores.encode()
        self._state.move(table.positions.argsort(stable=True, dim=-1), 0, table.pads)
        return True

    def _pads_without(self, count: int) -> Tensor:
        """`[B]` columns that count for no position, among all but the last `count`."""
        table = self._state.known
        later = self._padding.counted(table.seen - count, table.seen, table.rows, table.device)
        return table.pads if later is None else table.pads - (~later).sum(-1)

    def _tokens_among(self, count: int) -> Tensor:
        """`[B]` real tokens among the last `count` columns that are not hidden."""
        table = self._state.known
        later = self._padding.columns(table.seen - count, table.seen, table.rows, table.device)
        return torch.full_like(table.pads, count) if later is None else later.sum(-1)

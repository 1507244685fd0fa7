"""Remove tokens of the past that a later mask hides."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..masks.padding import Padding
from .moves import check_out, slots_of, take_out
from .paged import PagedLayer
from .plan import Plan


class Hiding:
    """Removes tokens that were visible and that a mask now hides, such as the pads that `generate` writes after a row
    has ended.

    No query of their row sees them any more, and their slots are the first to be used again. If one mask serves all
    layers, each layer has to empty the same number of slots per row: a layer that has evicted some of the hidden tokens
    evicts its tokens with the lowest scores instead, a few tokens earlier than otherwise.

    Args:
        layers: the layers that evict.
        padding: the pads of the batch.
        uniform: whether one mask serves all layers, rows and heads.
        plan: what the layers decide together.
    """

    def __init__(self, layers: Sequence[PagedLayer], padding: Padding, uniform: bool, plan: Plan) -> None:
        self._layers, self._padding, self._uniform, self._plan = layers, padding, uniform, plan

    def look(self, mask: Tensor | None, seen: int, rows: int, single: bool = False) -> None:
        """Compare a mask with the known visibility of the `seen` columns, see `Padding.newly_hidden`, and remove hidden
        tokens.

        Raises:
            ValueError: the mask shows tokens that were hidden, or hides tokens that cannot be removed. Nothing has
                changed then.
        """
        if mask is None and single and all(layer.table.all_real for layer in self._layers if layer.held):
            return  # the mask hides nothing, and `generate` was told that none is needed
        hidden = self._padding.newly_hidden(mask, seen, rows, single)
        if hidden is not None:
            self._hide(hidden)

    @without_autocast
    def _hide(self, columns: Tensor) -> None:
        if self._plan.static:
            self._plan.interrupt()
        self._plan.commit()
        hidden = self._padding.without(columns)
        for layer in self._layers:
            check_out(layer.state, hidden.ends)
        gone = [slots_of(layer.state, hidden.positions) for layer in self._layers]
        level = self._level(gone) if self._uniform else None
        for layer, slots in zip(self._layers, gone, strict=True):
            take_out(layer.state, slots, level, hidden.pads)
        self._padding.hide(hidden)

    @staticmethod
    def _level(gone: Sequence[Tensor]) -> Tensor | None:
        """`[B]` largest number of tokens that a set of any layer loses."""
        most = [slots.sum(-1).amax(-1) for slots in gone]
        return torch.stack([layer_most.to(most[0].device) for layer_most in most]).amax(0) if most else None

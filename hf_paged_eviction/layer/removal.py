"""Remove the tokens of a layer that a later mask hides."""

from torch import Tensor

from .kept_tokens import KeptTokens
from .layer_state import LayerState
from .scores import Scores


class Removal:
    """Removes tokens from a layer, whatever their scores. Their slots are the first to be used again.

    Args:
        state, scores, kept_tokens: parts of the layer.
    """

    def __init__(self, state: LayerState, scores: Scores, kept_tokens: KeptTokens) -> None:
        self._state, self._scores, self._kept_tokens = state, scores, kept_tokens

    def check(self, ends: bool) -> None:
        """Check that tokens can be removed.

        Args:
            ends: whether no visible token of their row follows them.

        Raises:
            ValueError: the disposal cannot undo its work on evicted tokens.
        """
        table = self._state.table
        if table is not None and table.held:
            self._state.action.check_removal(bool((table.evicted_tokens > 0).any()), ends)

    def slots(self, hidden: Tensor) -> Tensor:
        """`[B, S, held]` bool: the slots of the tokens whose positions are True in `hidden` `[B, seen]`."""
        positions = self._state.known.positions
        is_hidden = hidden.to(positions.device).gather(1, positions.clamp_min(0).flatten(1)).view_as(positions)
        return is_hidden & (positions >= 0)

    def take_out(self, gone: Tensor, level: Tensor | None, pads: Tensor) -> None:
        """Remove these tokens.

        Args:
            gone: see `slots`.
            level: `[B]` number of slots to empty in each set, at least the number of `gone` slots in any set. The
                tokens with the lowest scores fill the difference. None = empty only the `gone` slots.
            pads: `[B]` number of columns without a position from now on.
        """
        table = self._state.known
        self._scores.encode()
        if level is not None:
            missing = level.to(gone.device)[:, None] - gone.sum(-1)
            if bool((missing > 0).any()):
                gone = self._with_lowest(gone, missing)
        table.empty_out(gone)
        self._state.take_out(gone, pads.to(gone.device))

    def _with_lowest(self, gone: Tensor, missing: Tensor) -> Tensor:
        """These slots, and in each set so many more `[B, S]`: those of the tokens that would go first."""
        table, kept_tokens = self._state.known, self._kept_tokens
        fixed, newest = table.protected(table.positions), kept_tokens.newest(table.positions)
        table.empty_out(gone)
        table.refresh_scores(self._scores.in_slots)
        positions = table.positions
        scores = kept_tokens.judged(table.scores, positions)
        return gone | kept_tokens.lowest(scores, positions, newest, fixed, missing)

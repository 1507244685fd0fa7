"""Which tokens stay where more were held and came than may stay."""

from torch import Tensor

from ..table.ranking import (
    KEEP,
    best_tokens,
    best_within,
    exact_keys,
    rank_keys,
    rounded,
)
from .contents import Contents


class Survivors:
    """Chooses the tokens of a layer that stay, token by token: after a forward of several, or for a smaller budget.

    What leaves while single tokens come is chosen block by block, see `Cohort`.

    Args:
        contents: of the layer.
        absolute_noise: of the policy's scores, see `rank_keys`.
    """

    def __init__(self, contents: Contents, absolute_noise: bool) -> None:
        self._quota, self._outlet = contents.quota, contents.outlet
        self._contents, self._absolute_noise = contents, absolute_noise

    def judged(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Scores `[B, S, tokens]` as they are to be compared: rounded at once where other layers' are looked at."""
        if not self._quota.common:
            return scores
        return rounded(scores, positions.expand_as(scores) >= 0, self._absolute_noise)

    def offer(self, scores: Tensor, positions: Tensor) -> None:
        """Say what could stay of the tokens with these judged scores, where other layers' count as well."""
        if self._quota.common:
            least = self._contents.known.least(self._quota.budget, whole=False)
            self._quota.offer(self._rank(scores, positions), least)

    def limits(self, scores: Tensor, positions: Tensor) -> Tensor | None:
        """`[B, S]` how many of the tokens with these scores `[B, S, tokens]` may stay; None = equally many of all."""
        if not self._quota.unequal:
            return None
        pinned = scores.masked_fill(self._protected(positions), float("inf"))
        pinned = pinned.masked_fill(positions < 0, float("-inf"))
        return self._quota.limits(pinned, positions, self._contents.known.least(self._quota.budget, whole=True))

    def choose(self, scores: Tensor, positions: Tensor, limits: Tensor | None, columns: int) -> tuple[Tensor, Tensor]:
        """Indices of the tokens that stay, and their positions, both `[B, S, C]` in slot order.

        Args:
            scores, positions: `[B, S, tokens]`; -1 for pads.
            limits: see `limits`.
            columns: seen by then, pads included.
        """
        budget = self._quota.budget
        if limits is not None:
            return best_within(self._rank(scores, positions), positions, limits, budget.capacity)
        if self._outlet.picks_blocks:
            kept = self._outlet.best_blocks(self._contents.known, scores, positions, columns, budget)
        else:
            kept = best_tokens(self._rank(scores, positions), positions, budget.capacity)
        return kept, positions.gather(-1, kept)

    def _rank(self, scores: Tensor, positions: Tensor) -> Tensor:
        """`[B, S, tokens]` int64: the order in which tokens go, the protected ones last."""
        valid = (positions >= 0).expand_as(scores)
        if self._quota.common:
            rank = exact_keys(scores, positions, valid)
        else:
            rank = rank_keys(scores, positions, valid, self._absolute_noise)
        return rank.masked_fill(self._protected(positions), KEEP)

    def _protected(self, positions: Tensor) -> Tensor:
        """The row's newest tokens, and those in protected spans, of which its beginning is one."""
        newest = positions.amax(-1, keepdim=True) - self._quota.budget.recent
        return self._contents.known.protected(positions) | ((positions >= 0) & (positions > newest))

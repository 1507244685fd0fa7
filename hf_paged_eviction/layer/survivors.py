"""Which tokens stay where more were held and came than may stay."""

from torch import Tensor

from ..allocators.quota import Quota
from ..disposals import Outlet
from ..table.ranking import KEEP, best_tokens, best_within, exact_keys, rank_keys, rounded
from ..table.table import BlockTable


class Survivors:
    """Chooses the tokens of a layer that stay, token by token: after a forward of several, or for a smaller budget.

    What leaves while single tokens come is chosen block by block, see `Cohort`. Scores and positions are `[B, S,
    tokens]`, positions -1 for pads; `protected` as `protected` returns it.

    Args:
        quota, outlet: of the layer.
        absolute_noise: of the policy's scores, see `rank_keys`.
    """

    def __init__(self, quota: Quota, outlet: Outlet, absolute_noise: bool) -> None:
        self._quota, self._outlet, self._absolute_noise = quota, outlet, absolute_noise

    def judged(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Scores as they are to be compared: rounded at once where other layers' are looked at."""
        if not self._quota.common:
            return scores
        return rounded(scores, positions.expand_as(scores) >= 0, self._absolute_noise)

    def protected(self, table: BlockTable, positions: Tensor) -> Tensor:
        """Bool: the row's newest tokens, and those in protected spans, of which its beginning is one."""
        newest = positions.amax(-1, keepdim=True) - self._quota.budget.recent
        return table.protected(positions) | ((positions >= 0) & (positions > newest))

    def offer(self, table: BlockTable, scores: Tensor, positions: Tensor) -> None:
        """Say what could stay of the tokens with these judged scores, where other layers' count as well."""
        if self._quota.common:
            rank = self._rank(scores, positions, self.protected(table, positions))
            self._quota.offer(rank, table.least(self._quota.budget, whole=False))

    def limits(self, table: BlockTable, scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor | None:
        """`[B, S]` how many of these tokens may stay; None = equally many of all."""
        if not self._quota.unequal:
            return None
        pinned = scores.masked_fill(protected, float("inf")).masked_fill(positions < 0, float("-inf"))
        return self._quota.limits(pinned, positions, table.least(self._quota.budget, whole=True))

    def choose(
        self,
        table: BlockTable,
        scores: Tensor,
        positions: Tensor,
        protected: Tensor,
        limits: Tensor | None,
        count: int,
        columns: int,
    ) -> tuple[Tensor, Tensor]:
        """Indices of the tokens that stay, and their positions, both `[B, S, C]` in slot order.

        Args:
            limits: see `limits`.
            count: `C`, how many stay at most.
            columns: seen by then, pads included.
        """
        if limits is not None:
            return best_within(self._rank(scores, positions, protected), positions, limits, count)
        if self._outlet.picks_blocks:
            kept = self._outlet.best_blocks(table, scores, positions, columns, self._quota.budget)
        else:
            kept = best_tokens(self._rank(scores, positions, protected), positions, count)
        return kept, positions.gather(-1, kept)

    def _rank(self, scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
        """`[B, S, tokens]` int64: the order in which tokens go, the protected ones last."""
        valid = (positions >= 0).expand_as(scores)
        if self._quota.common:
            rank = exact_keys(scores, positions, valid)
        else:
            rank = rank_keys(scores, positions, valid, self._absolute_noise)
        return rank.masked_fill(protected, KEEP)

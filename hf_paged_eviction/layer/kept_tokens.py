"""Chooses the tokens that stay when there are more than the budget."""

import torch
from torch import Tensor

from ..allocators.split import LayerBudget
from ..disposals import EvictionAction
from ..ranking import KEEP, best_tokens, best_within, exact_keys, rank_keys, rounded
from ..table.table import BlockTable


class KeptTokens:
    """Chooses the tokens of a layer that stay, token by token: after a forward of several tokens, or for a smaller
    budget.

    Single tokens evict whole blocks, see `Group`. Scores and positions are `[B, S, tokens]`,
    positions -1 for pads; the argument `protected` is what the method `protected` returns.

    Args:
        budget, action: parts of the layer.
        absolute_noise: of the policy's scores, see `rank_keys`.
    """

    def __init__(self, budget: LayerBudget, action: EvictionAction, absolute_noise: bool) -> None:
        self._budget, self._action, self._absolute_noise = budget, action, absolute_noise

    def judged(self, scores: Tensor, positions: Tensor) -> Tensor:
        """The scores for comparisons; rounded, if they are compared with those of other layers."""
        if not self._budget.split.compares:
            return scores
        return rounded(scores, positions.expand_as(scores) >= 0, self._absolute_noise)

    def protected(self, table: BlockTable, positions: Tensor) -> Tensor:
        """Bool: the newest tokens of the row, and the tokens in protected spans; the start of the row is such a
        span."""
        return table.protected(positions) | self.newest(positions)

    def newest(self, positions: Tensor) -> Tensor:
        """Bool: the newest tokens of the row."""
        before = positions.amax(-1, keepdim=True) - self._budget.now.recent
        return (positions >= 0) & (positions > before)

    def offer(self, table: BlockTable, scores: Tensor, positions: Tensor) -> None:
        """Tell the split which tokens could stay, if it compares the tokens of all layers. Scores are those of
        `judged`."""
        split = self._budget.split
        if split.compares:
            ranks = self.rank(scores, positions, self.protected(table, positions))
            split.rank(self._budget, ranks, table.least(self._budget.now, whole=False))

    def limits(self, table: BlockTable, scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor | None:
        """`[B, S]` number of these tokens that may stay; None = the same number in all sets."""
        if not self._budget.split.unequal:
            return None
        pinned = scores.masked_fill(protected, float("inf")).masked_fill(positions < 0, float("-inf"))
        return self._budget.split.max_tokens(self._budget, pinned, positions, table.least(self._budget.now, whole=True))

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
            count: `C`, the largest number of tokens that stay.
            columns: number of columns seen by then, pads included.
        """
        if limits is not None:
            return best_within(self.rank(scores, positions, protected), positions, limits, count)
        if self._action.picks_blocks:
            kept_indices = self._action.best_blocks(table, scores, positions, columns, self._budget.now)
        else:
            kept_indices = best_tokens(self.rank(scores, positions, protected), positions, count)
        return kept_indices, positions.gather(-1, kept_indices)

    def lowest(self, scores: Tensor, positions: Tensor, newest: Tensor, fixed: Tensor, counts: Tensor) -> Tensor:
        """`[B, S, tokens]` bool: the first `counts` `[B, S]` tokens to go, even protected ones: first by rank, then the
        oldest of the `newest` tokens, then the oldest of those in a protected span, `fixed`."""
        rank = self.rank(scores, positions, torch.zeros_like(newest))
        rank = torch.where(newest, KEEP - 2**40 + positions, rank)
        rank = torch.where(fixed, KEEP - 2**39 + positions, rank)
        place = rank.masked_fill(positions < 0, KEEP).argsort(stable=True, dim=-1).argsort(-1)
        return place < counts[..., None]

    def rank(self, scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
        """`[B, S, tokens]` int64: the order of eviction, protected tokens last."""
        valid = (positions >= 0).expand_as(scores)
        if self._budget.split.compares:
            rank = exact_keys(scores, positions, valid)
        else:
            rank = rank_keys(scores, positions, valid, self._absolute_noise)
        return rank.masked_fill(protected, KEEP)

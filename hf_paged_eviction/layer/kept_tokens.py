"""Which tokens stay where more were held and came than may stay."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..allocators.split import LayerBudget
from ..disposals import EvictionAction
from ..ranking import DROP, KEEP, best_tokens, best_within, exact_keys, rank_keys, rounded
from ..table.table import BlockTable


class KeptTokens:
    """Chooses the tokens of a layer that stay, token by token: after a forward of several, for a smaller budget, and
    with one threshold over all layers also where single tokens need room.

    Else what leaves while single tokens come is chosen block by block, see `LayerGroup`. Scores and positions are
    `[B, S, tokens]`, positions -1 for pads; `protected` as `protected` returns it.

    Args:
        budget, action: of the layer.
        absolute_noise: of the policy's scores, see `rank_keys`.
    """

    def __init__(self, budget: LayerBudget, action: EvictionAction, absolute_noise: bool) -> None:
        self._budget, self._action, self._absolute_noise = budget, action, absolute_noise

    def judged(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Scores as they are to be compared: rounded at once where other layers' are looked at."""
        if not self._budget.split.compares:
            return scores
        return rounded(scores, positions.expand_as(scores) >= 0, self._absolute_noise)

    def protected(self, table: BlockTable, positions: Tensor) -> Tensor:
        """Bool: the row's newest tokens, and those in protected spans, of which its beginning is one."""
        return table.protected(positions) | self.newest(positions)

    def newest(self, positions: Tensor) -> Tensor:
        """Bool: the row's newest tokens."""
        before = positions.amax(-1, keepdim=True) - self._budget.now.recent
        return (positions >= 0) & (positions > before)

    def offer(self, table: BlockTable, scores: Tensor, positions: Tensor, free: Tensor | None = None) -> None:
        """Say what could stay of the tokens with these judged scores, where other layers' count as well.

        Args:
            free: `[B]` single tokens to come for which each set needs room beside them. Rows that need none keep what
                they have. None = other tokens came, and all rows choose anew.
        """
        if not self._budget.split.compares:
            return
        rank = self.rank(scores, positions, self.protected(table, positions))
        least = table.least(self._budget.now, whole=False)
        if free is not None:
            most = max(table.capacity, rank.shape[-1] + table.most_ahead)
            rank, least = with_room(rank, free, table.usable, most), least + free
        self._budget.split.add_ranks(self._budget, rank, least)

    def limits(self, table: BlockTable, scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor | None:
        """`[B, S]` how many of these tokens may stay; None = equally many of all."""
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
        free: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Indices of the tokens that stay, and their positions, both `[B, S, C]` in slot order.

        Args:
            limits: see `limits`.
            count: `C`, how many stay at most.
            columns: seen by then, pads included.
            free: `[B]` of the limits are left empty; None = none.
        """
        if limits is not None:
            return best_within(self.rank(scores, positions, protected), positions, limits, count, free)
        if self._action.picks_blocks:
            kept_indices = self._action.best_blocks(table, scores, positions, columns, self._budget.now)
        else:
            kept_indices = best_tokens(self.rank(scores, positions, protected), positions, count)
        return kept_indices, positions.gather(-1, kept_indices)

    def lowest(self, scores: Tensor, positions: Tensor, newest: Tensor, fixed: Tensor, counts: Tensor) -> Tensor:
        """`[B, S, tokens]` bool, so many `[B, S]` of these tokens, whatever is protected: those that would go first,
        then the oldest of the `newest`, then of those in a protected span, `fixed`."""
        rank = self.rank(scores, positions, torch.zeros_like(newest))
        rank = torch.where(newest, KEEP - 2**40 + positions, rank)
        rank = torch.where(fixed, KEEP - 2**39 + positions, rank)
        place = rank.masked_fill(positions < 0, KEEP).argsort(stable=True, dim=-1).argsort(-1)
        return place < counts[..., None]

    def rank(self, scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
        """`[B, S, tokens]` int64: the order in which tokens go, the protected ones last."""
        valid = (positions >= 0).expand_as(scores)
        if self._budget.split.compares:
            rank = exact_keys(scores, positions, valid)
        else:
            rank = rank_keys(scores, positions, valid, self._absolute_noise)
        return rank.masked_fill(protected, KEEP)


def with_room(rank: Tensor, free: Tensor, usable: Tensor, most: int) -> Tensor:
    """What sets offer where single tokens are to come: these before all that is held.

    Args:
        rank: `[B, S, tokens]` of what is held.
        free: `[B]` tokens to come. Rows where it is 0 offer all slots that they have, so that they keep them.
        usable: `[B, S]` slots of each set now.
        most: `n`, no set offers more.

    Returns:
        `[B, S, n]`.
    """
    held = rank.shape[-1]
    rank = pad(rank, (0, most - held), value=DROP)
    places = torch.arange(rank.shape[-1], device=rank.device)
    coming = (places >= held) & (places < held + free[:, None, None])
    same = (free == 0)[:, None, None] & (places < usable[..., None])
    return rank.masked_fill(coming | same, KEEP)

"""The shares of a cache's layers, decided while a forward walks through them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from ..queries.observer import Queries, fold
from ..saved import LONGEST, SavedState, StateDict
from ..table.budget import BlockBudget
from ..table.spans import Spans
from .base import FixedAllocator, LayerAllocator
from .share import share_out
from .sharing import Sharing


class Cascade(Sharing):
    """What each layer, or each KV head, may hold (CAKE's cascade, arXiv 2503.12491).

    The total is shared out among the layers that have attended so far. Each new one takes from the others, so their sum
    never exceeds the total; until the last one is through, none gets more than its row has tokens. Where the shares
    depend on the layer's place alone, all are known as soon as the first layer says how many tokens each row has.

    Args:
        allocator: weighs the layers.
        budget: mean share.
    """

    def __init__(self, allocator: LayerAllocator | FixedAllocator, budget: BlockBudget) -> None:
        super().__init__(budget)
        self._allocator = allocator
        self._times = allocator.foreseen if isinstance(allocator, FixedAllocator) else None
        self._preferences: dict[int, Tensor] = {}  # by place, [B, 1 or H]
        self._real: Tensor | None = None  # [B] real tokens when shares were decided last
        self._settled: Tensor | None = None  # [B] rows that were shared out because they overflowed
        self._foreseen: tuple[int, Tensor] | None = None  # columns seen, and [B] rows that were shared out then
        self._heads: list[int] = []  # KV heads by place, where there are shares for each

    def check_heads(self, place: int, kv_heads: int) -> None:
        """Refuse shares of a layer with another number of KV heads.

        Raises:
            ValueError: with both numbers.
        """
        allocator, one = self._allocator, torch.ones(1, dtype=torch.int64)
        if not (isinstance(allocator, FixedAllocator) and allocator.per_head):
            return
        if not self._heads:
            shares = allocator.shares(self.layers, self.budget.capacity if self.budget.tokens else 1, one)
            self._heads = [share.shape[1] for share in shares]
        known = self._heads[place]
        if known != kv_heads:
            raise ValueError(
                f"allocator={allocator.name!r} has shares for {known} KV heads of the layer that evicts as number "
                f"{place} (counted from 0), and this model has {kv_heads} there."
            )

    def attended(
        self, place: int, local_heads: LocalHeads, queries: Queries, key_positions: Tensor, query_positions: Tensor
    ) -> bool:
        """Share out anew.

        Returns whether the other layers have to fit what they may hold then, so that the total holds. Where shares were
        known beforehand, each fits when its own tokens come.

        Args:
            place: of the layer whose queries these are.
            local_heads: which of its heads this process holds.
            key_positions: `[B, kv_heads, tokens]`.
            query_positions: `[B, q]`.
        """
        allocator, real = self._allocator, key_positions[:, 0].amax(-1) + 1
        if isinstance(allocator, FixedAllocator):
            if place == 0:
                self._share_out(real)
                self._settle(real > self.budget.capacity)
            return False
        settled = self._settled if allocator.once else None
        if settled is not None and bool(settled.all()):
            if place == 0:
                self._share_out(real)
            return False
        zero = torch.zeros((), device=key_positions.device)
        start = {name: zero for name in allocator.token_statistics}
        found = fold(allocator.observe, start, queries, key_positions, query_positions, allocator.window, local_heads)
        found = {name: local_heads.gather(values) for name, values in found.items()}
        preference = allocator.preference(found, local_heads.gather(key_positions))
        preference = preference.view(len(preference), -1)
        if settled is not None:
            preference = torch.where(settled[:, None], self._preferences[place], preference)
        self._preferences[place] = preference
        self._share_out(real)
        if place == self.layers - 1:
            self._settle(real > self.budget.capacity)
        return True

    def _settle(self, rows: Tensor) -> None:
        self._settled = rows if self._settled is None else self._settled | rows

    @property
    def foresees(self) -> bool:
        """Whether rows that single tokens fill are shared out anew."""
        return self._times is not None

    def foresee(self, filled: Tensor, seen: int) -> None:
        """Share out anew those of these rows `[B]` that never were; each row alone, whatever the others do.

        Args:
            seen: columns, of all rows.
        """
        rows = filled if self._settled is None else filled & ~self._settled
        self._foreseen = None
        if self._times is None or not bool(rows.any()):
            return
        capacity, before, shares = self.budget.capacity, self._real, self._shares
        self._settle(rows)
        real = torch.full_like(rows, capacity, dtype=torch.int64) if before is None else before
        self._share_out(torch.where(rows, self._times * capacity, real))
        equal = torch.full((), capacity, device=rows.device)
        self._shares = {
            place: torch.where(rows[:, None], share, shares.get(place, equal)) for place, share in self._shares.items()
        }
        self._foreseen = seen, rows

    def foreseen(self, seen: int) -> Tensor | None:
        """The rows `[B]` that were shared out anew after so many columns; None = none."""
        return self._foreseen[1] if self._foreseen is not None and self._foreseen[0] == seen else None

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """See `Sharing.protect`: decide anew."""
        super().protect(spans)
        if self._real is not None:
            self._share_out(self._real)

    def shrink(self, budget: BlockBudget) -> None:
        """See `Sharing.shrink`: decide anew."""
        super().shrink(budget)
        if self._real is not None:
            self._share_out(self._real)
            self._settle(self._real > budget.capacity)

    def _share_out(self, real: Tensor) -> None:
        self._real = real
        if isinstance(self._allocator, FixedAllocator):
            shares = dict(enumerate(fixed_shares(self._allocator, self.layers, self.budget, real)))
        else:
            shares = self._of_preferences(self._allocator, real)
        self._shares = {place: share.to(real.device) for place, share in shares.items()}

    def _of_preferences(self, allocator: LayerAllocator, real: Tensor) -> dict[int, Tensor]:
        """By place, `[B, 1 or H]` tokens of the layers whose preferences are known."""
        known = [self._preferences[place] for place in sorted(self._preferences)]
        weights = allocator.weights(torch.cat(known, dim=1), self.budget.capacity)
        parts = weights.split([each.shape[1] for each in known], dim=1)
        return dict(zip(sorted(self._preferences), _shared_out(parts, self.layers, self.budget, real), strict=True))

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Sharing.map_rows`."""
        super().map_rows(change)
        self._preferences = {place: change(preference) for place, preference in self._preferences.items()}
        self._real = None if self._real is None else change(self._real)
        self._settled = None if self._settled is None else change(self._settled)

    def clear(self) -> None:
        """See `Sharing.clear`."""
        super().clear()
        self._preferences, self._real, self._settled, self._foreseen = {}, None, None, None

    def state_dict(self) -> StateDict:
        """See `Sharing.state_dict`."""
        known = {"preferences": self._preferences, "real": self._real, "settled": self._settled}
        return {**super().state_dict(), **known}

    def load_state(self, saved: SavedState, rows: int) -> None:
        """See `Sharing.load_state`."""
        super().load_state(saved, rows)
        preferences = saved.part("preferences")
        for place in range(self.layers):
            if preferences.has(str(place)):
                self._preferences[place] = preferences.tensor(str(place), (rows, None), None)
        self._real = saved.tensor("real", (rows,), torch.int64, 0, LONGEST) if saved.has("real") else None
        self._settled = saved.tensor("settled", (rows,), torch.bool) if saved.has("settled") else None


def fixed_shares(allocator: FixedAllocator, layers: int, budget: BlockBudget, real: Tensor) -> list[Tensor]:
    """Tokens that each layer, or each of its KV heads, may hold, where that is known beforehand.

    Args:
        layers: how many share.
        budget: mean share.
        real: `[B]` tokens that each row has to hold.

    Returns:
        `[B, 1 or H]` int64 for each layer, on the CPU.
    """
    return _shared_out(allocator.shares(layers, budget.capacity, real), layers, budget, real)


def _shared_out(weights: Sequence[Tensor], layers: int, budget: BlockBudget, real: Tensor) -> list[Tensor]:
    """Tokens in proportion to the weights `[B, 1 or H]` of the first layers, of which there are so many in all."""
    size, widths = budget.block_size, [each.shape[1] for each in weights]
    total = budget.capacity // size * (sum(widths) + (layers - len(weights)) * widths[-1])
    most, smallest = (-(-real // size)).cpu(), budget.smallest // size
    blocks = share_out(torch.cat([each.cpu() for each in weights], dim=1), total, smallest, most)
    if len(weights) < layers:
        blocks = blocks.minimum(most.clamp_min(smallest)[:, None])
    return list((blocks * size).split(widths, dim=1))

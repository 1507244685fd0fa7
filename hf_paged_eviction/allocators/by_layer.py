"""Divides the budget of a cache among its layers, or all its KV heads, while a forward goes through the layers."""

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
from .split import BudgetSplit, LayerBudget


class LayerSplit(BudgetSplit):
    """Gives each layer, or each KV head, its own budget (CAKE's cascade, arXiv 2503.12491).

    The total is divided among the layers that have attended so far. Each new layer takes from the earlier ones, so the
    sum never exceeds the total. Until the last layer has attended, no share exceeds the number of tokens of its row. If
    the shares depend only on the place of the layer, all are known when the first layer gets its tokens.

    Args:
        allocator: weighs the layers.
        mean: budget of a layer, or of a head.
    """

    unequal = among_layers = decides = True

    def __init__(self, allocator: LayerAllocator | FixedAllocator, mean: BlockBudget) -> None:
        super().__init__(mean)
        self._allocator = allocator
        self._times = allocator.foreseen if isinstance(allocator, FixedAllocator) else None
        self.foresees = self._times is not None
        self._preferences: dict[int, Tensor] = {}  # by place, [B, 1 or H]
        self._real: Tensor | None = None  # [B] real tokens when shares were decided last
        self._settled: Tensor | None = None  # [B] rows that were shared out because they overflowed
        self._foreseen: tuple[int, Tensor] | None = None  # columns seen, and [B] rows that were shared out then
        self._heads: list[int] = []  # KV heads by place, where there are shares for each
        self._here: dict[int, slice] = {}  # by place, heads that this process holds

    # ---- what layers ask ------------------------------------------------------------------------------------------

    def check(self, layer: LayerBudget, kv_heads: int, local_heads: LocalHeads) -> None:
        """See `BudgetSplit.check`."""
        allocator, first = self._allocator, local_heads.first_head(kv_heads)
        self._here[layer.place] = slice(first, first + kv_heads)
        if not (isinstance(allocator, FixedAllocator) and allocator.per_head):
            return
        if not self._heads:
            one = torch.ones(1, dtype=torch.int64, device="cpu")
            shares = allocator.shares(self.layers, self.mean.capacity if self.mean.tokens else 1, one)
            self._heads = [share.shape[1] for share in shares]
        heads, wanted = kv_heads * local_heads.processes(kv_heads), self._heads[layer.place]
        if heads != wanted:
            raise ValueError(
                f"allocator={allocator.name!r} has shares for {wanted} KV heads of the layer that evicts as number "
                f"{layer.place} (counted from 0), and this model has {heads} there."
            )

    def _tokens_here(self, layer: LayerBudget) -> Tensor | None:
        """`[B, 1 or H]` tokens, of the heads that are here."""
        tokens = self.tokens(layer.place)
        return tokens if tokens is None or tokens.shape[1] == 1 else tokens[:, self._here[layer.place]]

    def for_policy(self, layer: LayerBudget) -> int | Tensor:
        """See `LayerBudget.for_policy`."""
        tokens = self._tokens_here(layer)
        return layer.now.capacity if tokens is None else tokens[..., None]

    def max_tokens(self, layer: LayerBudget, pinned: Tensor, positions: Tensor, min_tokens: Tensor) -> Tensor | None:
        """See `BudgetSplit.max_tokens`."""
        tokens = self._tokens_here(layer)
        mean = torch.full((len(positions), 1), layer.now.capacity, device=positions.device)
        return (mean if tokens is None else tokens.to(mean)).expand(-1, pinned.shape[1])

    def decide(
        self,
        layer: LayerBudget,
        held: int,
        local_heads: LocalHeads,
        queries: Queries,
        key_positions: Tensor,
        query_positions: Tensor,
    ) -> bool:
        """See `BudgetSplit.decide`."""
        allocator, place, real = self._allocator, layer.place, key_positions[:, 0].amax(-1) + 1
        if place == 0 and held == 0:
            self.clear()  # another prompt
        self._begin(layer)
        if isinstance(allocator, FixedAllocator):
            if place == 0:
                self._share_out(real)
                self._settle(real > self.mean.capacity)
            return False
        settled = self._settled if allocator.once else None
        if settled is not None and bool(settled.all()):
            if place == 0:
                self._share_out(real)
            return False
        zero = torch.zeros((), device=key_positions.device)
        start = {name: zero for name in allocator.token_statistics}
        statistics = fold(
            allocator.observe, start, queries, key_positions, query_positions, allocator.window, local_heads
        )
        statistics = {name: local_heads.gather(values) for name, values in statistics.items()}
        preference = allocator.preference(statistics, local_heads.gather(key_positions))
        preference = preference.view(len(preference), -1)
        if settled is not None:
            preference = torch.where(settled[:, None], self._preferences[place], preference)
        self._preferences[place] = preference
        self._share_out(real)
        if place == self.layers - 1:
            self._settle(real > self.mean.capacity)
        return True

    def _begin(self, layer: LayerBudget) -> None:
        if layer.place == 0 and self.tokens(0) is None:
            self.begin(layer.now)

    def _settle(self, rows: Tensor) -> None:
        self._settled = rows if self._settled is None else self._settled | rows

    def foresee(self, layer: LayerBudget, filled: Tensor, seen: int) -> Tensor | None:
        """See `BudgetSplit.foresee`: for rows without shares so far, each row by itself."""
        if layer.place == 0:
            self._begin(layer)
            self._foresee(filled, seen)
        return self._foreseen[1] if self._foreseen is not None and self._foreseen[0] == seen else None

    def _foresee(self, filled: Tensor, seen: int) -> None:
        rows = filled if self._settled is None else filled & ~self._settled
        self._foreseen = None
        if self._times is None or not bool(rows.any()):
            return
        capacity, before, tokens = self.mean.capacity, self._real, self._tokens
        self._settle(rows)
        real = torch.full_like(rows, capacity, dtype=torch.int64) if before is None else before
        self._share_out(torch.where(rows, self._times * capacity, real))
        equal = torch.full((), capacity, device=rows.device)
        self._tokens = {
            place: torch.where(rows[:, None], share, tokens.get(place, equal)) for place, share in self._tokens.items()
        }
        self._foreseen = seen, rows

    # ---- what happens to the cache --------------------------------------------------------------------------------

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """See `BudgetSplit.protect`. The next forward decides anew."""
        super().protect(spans)
        if self._real is not None:
            self._share_out(self._real)

    def shrink(self, mean: BlockBudget) -> None:
        """See `BudgetSplit.shrink`. The next forward decides anew."""
        super().shrink(mean)
        if self._real is not None:
            self._share_out(self._real)
            self._settle(self._real > mean.capacity)

    def _share_out(self, real: Tensor) -> None:
        self._real = real
        if isinstance(self._allocator, FixedAllocator):
            shares = dict(enumerate(fixed_shares(self._allocator, self.layers, self.mean, real)))
        else:
            shares = self._of_preferences(self._allocator, real)
        self._tokens = {place: share.to(real.device) for place, share in shares.items()}

    def _of_preferences(self, allocator: LayerAllocator, real: Tensor) -> dict[int, Tensor]:
        """By place, the budgets `[B, 1 or H]` in tokens of the layers whose preferences are known."""
        preferences = [self._preferences[place] for place in sorted(self._preferences)]
        weights = allocator.weights(torch.cat(preferences, dim=1), self.mean.capacity)
        parts = weights.split([preference.shape[1] for preference in preferences], dim=1)
        return dict(zip(sorted(self._preferences), _shared_out(parts, self.layers, self.mean, real), strict=True))

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `BudgetSplit.map_rows`."""
        super().map_rows(change)
        self._preferences = {place: change(preference) for place, preference in self._preferences.items()}
        self._real = None if self._real is None else change(self._real)
        self._settled = None if self._settled is None else change(self._settled)

    def clear(self) -> None:
        """See `BudgetSplit.clear`."""
        super().clear()
        self._preferences, self._real, self._settled, self._foreseen = {}, None, None, None

    def state_dict(self) -> StateDict:
        """See `BudgetSplit.state_dict`."""
        settings = {"preferences": self._preferences, "real": self._real, "settled": self._settled}
        return {**super().state_dict(), **settings}

    def load_state(self, saved: SavedState, rows: int) -> None:
        """See `BudgetSplit.load_state`."""
        super().load_state(saved, rows)
        preferences = saved.part("preferences")
        for place in range(self.layers):
            if preferences.has(str(place)):
                self._preferences[place] = preferences.tensor(str(place), (rows, None), None)
        self._real = saved.tensor("real", (rows,), torch.int64, 0, LONGEST) if saved.has("real") else None
        self._settled = saved.tensor("settled", (rows,), torch.bool) if saved.has("settled") else None


def fixed_shares(allocator: FixedAllocator, layers: int, budget: BlockBudget, real: Tensor) -> list[Tensor]:
    """Compute the budgets of an allocator that does not depend on the prompt.

    Args:
        layers: number of layers.
        budget: mean share.
        real: `[B]` number of real tokens of each row.

    Returns:
        `[B, 1 or H]` int64 for each layer, on the CPU.
    """
    return _shared_out(allocator.shares(layers, budget.capacity, real), layers, budget, real)


def _shared_out(weights: Sequence[Tensor], layers: int, budget: BlockBudget, real: Tensor) -> list[Tensor]:
    """Divide the total of `layers` layers by the weights `[B, 1 or H]` of the first of them; in tokens."""
    size, widths = budget.block_size, [layer_weights.shape[1] for layer_weights in weights]
    total = budget.capacity // size * (sum(widths) + (layers - len(weights)) * widths[-1])
    most, smallest = (-(-real // size)).cpu(), budget.smallest // size
    blocks = share_out(torch.cat([layer_weights.cpu() for layer_weights in weights], dim=1), total, smallest, most)
    if len(weights) < layers:
        blocks = blocks.minimum(most.clamp_min(smallest)[:, None])
    return list((blocks * size).split(widths, dim=1))

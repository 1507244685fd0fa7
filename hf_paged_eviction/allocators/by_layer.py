"""Divides the budget of a cache among its layers, or all its KV heads."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from ..queries.observer import Queries, fold
from ..table.budget import BlockBudget
from ..tensors.saved import LONGEST, SavedState, StateDict
from .base import FixedAllocator, LayerAllocator
from .share import share_out
from .split import BudgetSplit, LayerBudget


class LayerSplit(BudgetSplit):
    """Gives each layer, or each KV head, its own budget.

    If budgets depend only on the place of the layer and the length of the text, all are known when the first layer has
    to choose. If they depend on attention (CAKE, arXiv 2503.12491), the first choice follows the last layer.

    Args:
        allocator: weighs the layers.
        mean: budget of a layer, or of a head.
    """

    unequal = has_state = True

    def __init__(self, allocator: LayerAllocator | FixedAllocator, mean: BlockBudget) -> None:
        super().__init__(mean)
        self._allocator = allocator
        self.settles = isinstance(allocator, LayerAllocator)
        self._times = allocator.foreseen if isinstance(allocator, FixedAllocator) else None
        self.foresees = self._times is not None
        self._preferences: dict[int, Tensor] = {}  # by place, [B, 1 or H]
        self._real: Tensor | None = None  # [B] real tokens when budgets were decided last
        self._settled: Tensor | None = None  # [B] rows that got their budgets because they overflowed
        self._foreseen: tuple[int, Tensor] | None = None  # columns seen, and [B] rows that got budgets then
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

    @property
    def waits(self) -> bool:
        """See `BudgetSplit.waits`: if the first prompt decides for the rest of the text, for that one only."""
        return self.settles and not (self._once and self._settled is not None and bool(self._settled.all()))

    @property
    def _once(self) -> bool:
        return isinstance(self._allocator, LayerAllocator) and self._allocator.once

    def divide(self, layer: LayerBudget, real: Tensor) -> None:
        """See `BudgetSplit.divide`."""
        if layer.place == 0 and not self.waits:
            self._begin(layer)
            self._share_out(real)
            self._settle(real > self.mean.capacity)

    def attend(
        self,
        layer: LayerBudget,
        local_heads: LocalHeads,
        queries: Queries,
        key_positions: Tensor,
        query_positions: Tensor,
    ) -> None:
        """See `BudgetSplit.attend`."""
        allocator, place = self._allocator, layer.place
        if not isinstance(allocator, LayerAllocator):
            return
        self._begin(layer)
        zero = torch.zeros((), device=key_positions.device)
        start = {name: zero for name in allocator.token_statistics}
        statistics = fold(
            allocator.observe, start, queries, key_positions, query_positions, allocator.window, local_heads
        )
        statistics = {name: local_heads.gather(values) for name, values in statistics.items()}
        preference = allocator.preference(statistics, local_heads.gather(key_positions))
        preference = preference.view(len(preference), -1)
        if allocator.once and self._settled is not None:
            preference = torch.where(self._settled[:, None], self._preferences[place], preference)
        self._preferences[place] = preference

    def settle(self, real: Tensor) -> None:
        """See `BudgetSplit.settle`."""
        self._share_out(real)
        self._settle(real > self.mean.capacity)

    def divide_anew(self, real: Tensor) -> None:
        """See `BudgetSplit.divide_anew`: by what decided last."""
        if self._preferences or not self.settles:
            self.settle(real if self._real is None else self._real)

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

    def _share_out(self, real: Tensor) -> None:
        self._real = real
        if isinstance(self._allocator, FixedAllocator):
            shares = dict(enumerate(fixed_shares(self._allocator, self.layers, self.mean, real)))
        else:
            shares = self._of_preferences(self._allocator, real)
        self._tokens = {place: share.to(real.device) for place, share in shares.items()}

    def _of_preferences(self, allocator: LayerAllocator, real: Tensor) -> dict[int, Tensor]:
        """By place, the budgets `[B, 1 or H]` in tokens."""
        preferences = [self._preferences[place].to(real.device) for place in range(self.layers)]
        weights = allocator.weights(torch.cat(preferences, dim=1), self.mean.capacity)
        parts = weights.split([preference.shape[1] for preference in preferences], dim=1)
        return dict(enumerate(_shared_out(parts, self.mean, real)))

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
    return _shared_out(allocator.shares(layers, budget.capacity, real), budget, real)


def _shared_out(weights: Sequence[Tensor], budget: BlockBudget, real: Tensor) -> list[Tensor]:
    """Divide the total by the weights `[B, 1 or H]` of all layers; in tokens."""
    size, widths = budget.block_size, [layer_weights.shape[1] for layer_weights in weights]
    total = budget.capacity // size * sum(widths)
    most, smallest = (-(-real // size)).cpu(), budget.smallest // size
    blocks = share_out(torch.cat([layer_weights.cpu() for layer_weights in weights], dim=1), total, smallest, most)
    return list((blocks * size).split(widths, dim=1))

"""How many tokens each layer, row and KV head of one cache may hold."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from ..queries.observer import Queries, fold
from ..table.budget import BlockBudget
from ..table.spans import Spans
from ..tensors.saved import StateDict
from .base import BudgetAllocator, FixedAllocator, HeadAllocator, LayerAllocator
from .uniform import Uniform


class Limits:
    """The limits of all layers of a cache, in tokens. Until they are decided, each row and head gets the mean.

    Limits change between forwards only: when a forward of several tokens does not fit, when single tokens have filled
    a row, and in `shrink` and `protect`. Single tokens after that evict within each set. A `FixedAllocator` decides
    before the first layer chooses (`divide`), a `HeadAllocator` when a layer chooses (`LayerLimits.max_tokens`), and
    others after the last layer has attended (`settle`).

    Attributes:
        allocator: decides.
        mean: mean budget of a layer, or of a head. A share or bytes become tokens at the first forward.
        layers: the layers so far.
        unequal: whether rows or heads may have different limits. The storage then fits the largest, and slots beyond a
            smaller limit are dead.
        waits: whether the next forward of several tokens that does not fit has to be settled. Each layer then keeps the
            new tokens until the last one has attended, and calls `attend` before.
        foreseen: when single tokens have filled a row, limits are decided for a text of so many budgets; None = never.

    Args:
        allocator, mean: see above.
    """

    def __init__(self, allocator: BudgetAllocator, mean: BlockBudget) -> None:
        self.allocator, self._asked = allocator, mean
        self.layers: list[LayerLimits] = []
        decides = isinstance(allocator, FixedAllocator | LayerAllocator | HeadAllocator)
        self.unequal = decides and not isinstance(allocator, Uniform)
        self.foreseen = allocator.foreseen if isinstance(allocator, FixedAllocator) else None
        self.clear()

    def clear(self) -> None:
        """Forget the prompt."""
        self.mean = self._asked
        self.tokens: dict[int, Tensor] = {}  # by place, [B, 1 or heads]; empty before the first decision
        self._told: dict[int, Tensor] = {}  # by place, what `settle` of the allocator takes
        self._decide_for(None)
        self._filled: tuple[int, Tensor] | None = None  # columns seen, and [B] rows that single tokens have filled

    # ---- decisions ------------------------------------------------------------------------------------------------

    def _decide_for(self, real: Tensor | None) -> None:
        self._real, allocator = real, self.allocator
        self._decided = None if real is None else real > self.mean.capacity
        self.waits, self._undecided = isinstance(allocator, LayerAllocator), self.foreseen is not None
        once = self._undecided or (isinstance(allocator, LayerAllocator) and allocator.once)
        if self._decided is not None and once and bool(self._decided.all()):
            self.waits = self._undecided = False

    def divide(self, layer: "LayerLimits", real: Tensor) -> None:
        """A layer is about to choose among more tokens than fit, of rows that have seen `real` `[B]` tokens."""
        if layer.place == 0 and not self.waits:
            self.settle(real)

    def divide_anew(self, real: Tensor) -> None:
        """Decide about the held tokens after `shrink` or `protect`, by what decided last."""
        if self._told or isinstance(self.allocator, FixedAllocator):
            self.settle(real if self._real is None else self._real)

    def settle(self, real: Tensor) -> None:
        """Decide, after what `waits` says; `real` as in `divide`."""
        allocator, mean = self.allocator, self.mean
        if isinstance(allocator, LayerAllocator):
            told = [self._told[place].to(real.device) for place in range(len(self.layers))]
            shares = allocator.settle(told, mean, real)
        elif isinstance(allocator, FixedAllocator) and self.unequal:
            shares = allocator.limits(mean, len(self.layers), real)
        else:
            return
        self.tokens = {place: tokens.to(real.device) for place, tokens in enumerate(shares)}
        self._decide_for(real)

    def attend(
        self,
        layer: "LayerLimits",
        local_heads: LocalHeads,
        queries: Queries,
        key_positions: Tensor,
        query_positions: Tensor,
        all_real: bool,
    ) -> None:
        """Take the attention of a layer, before `settle`.

        Args:
            local_heads: which of its heads this process holds.
            key_positions: `[B, kv_heads, tokens]`.
            query_positions: `[B, q]`.
            all_real: see `fold`.
        """
        allocator, decided = self.allocator, self._decided
        if not isinstance(allocator, LayerAllocator):
            return
        start = dict.fromkeys(allocator.token_statistics, torch.zeros((), device=key_positions.device))
        statistics = fold(
            allocator.observe,
            start,
            queries,
            key_positions,
            query_positions,
            allocator.window,
            local_heads,
            weights=allocator.reads_weights,
            all_real=all_real,
        )
        statistics = {name: local_heads.gather(values) for name, values in statistics.items()}
        preference = allocator.preference(statistics, local_heads.gather(key_positions)).view(len(key_positions), -1)
        if allocator.once and decided is not None:
            preference = torch.where(decided[:, None], self._told[layer.place], preference)
        self._told[layer.place] = preference

    def foresees(self, seen: int) -> bool:
        """Whether layers must `foresee` after `seen` columns, if single tokens have filled rows."""
        return self._undecided or (self._filled is not None and self._filled[0] == seen)

    def foresee(self, layer: "LayerLimits", filled: Tensor, seen: int) -> Tensor | None:
        """Decide about the rows `[B]` bool that single tokens have filled, after `seen` columns. Returns the rows with
        new limits; None = none."""
        if layer.place == 0:
            real, rows = self._real, filled if self._decided is None else filled & ~self._decided
            self._filled = (seen, rows) if bool(rows.any()) else None
            if self._filled is not None and self.foreseen is not None:
                capacity = self.mean.capacity
                self.settle(torch.where(rows, self.foreseen * capacity, capacity if real is None else real))
        return self._filled[1] if self._filled is not None and self._filled[0] == seen else None

    # ---- what happens to the cache --------------------------------------------------------------------------------

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """Protect other spans from now on, see `BlockBudget`. The tables of the layers do not change yet."""
        self._asked, self.mean = replace(self._asked, spans=spans), replace(self.mean, spans=spans)
        for layer in self.layers:
            layer.mean, layer.now = replace(layer.mean, spans=spans), replace(layer.now, spans=spans)

    def shrink(self, mean: BlockBudget) -> None:
        """Set another mean. The tables of the layers do not change yet."""
        self._asked, self.mean = mean, mean
        for layer, budget in zip(self.layers, self.allocator.budgets(mean, len(self.layers)), strict=True):
            layer.give(budget)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all that belongs to a row."""
        self.tokens = {place: change(tokens) for place, tokens in self.tokens.items()}
        self._told = {place: change(told) for place, told in self._told.items()}
        self._decide_for(None if self._real is None else change(self._real))

    def state_dict(self) -> StateDict:
        """The present limits, and what decided them."""
        return {"mean": self.mean.tokens, "tokens": self.tokens, "told": self._told, "real": self._real}

    def load_state(self, saved: StateDict) -> None:
        """Restore the limits of another cache."""
        self.mean = self.mean.of(saved["mean"])
        self.tokens, self._told = ({int(at): its for at, its in saved[name].items()} for name in ("tokens", "told"))
        self._decide_for(saved["real"])

    @cached_property
    def heads(self) -> list[int]:
        """KV heads for which a `FixedAllocator` has shares, by place."""
        fixed, one = self.allocator, torch.ones(1, dtype=torch.int64, device="cpu")
        shares = fixed.shares(len(self.layers), self.mean.tokens or 1, one) if isinstance(fixed, FixedAllocator) else []
        return [share.shape[1] for share in shares]


class LayerLimits:
    """The budget of one layer: the same in every row and head, unless the table has limits for them.

    Attributes:
        mean: budget of the layer; a mean if rows or heads have different limits.
        now: the present budget of the longest row and head. A budget in bytes, or as a share of the prompt, becomes a
            number of tokens at the first forward.
        table: the limits of all layers.
        place: index of the layer among these.

    Args:
        mean, table: see above; None = the layer alone.
    """

    def __init__(self, mean: BlockBudget, table: Limits | None = None) -> None:
        self.mean = self.now = mean
        self.table = table or Limits(Uniform(), mean)
        self.place = len(self.table.layers)
        self.table.layers.append(self)
        self._heads = slice(None)  # of this process

    def check(self, kv_heads: int, local_heads: LocalHeads) -> None:
        """Check that the layer's number of heads, and the processes that hold them, fit the allocator.

        Raises:
            ValueError: with the way out.
        """
        allocator, processes = self.table.allocator, local_heads.processes(kv_heads)
        first = local_heads.first_head(kv_heads) if processes > 1 else 0
        self._heads = slice(first, first + kv_heads)
        if processes > 1 and isinstance(allocator, HeadAllocator):
            raise ValueError(
                f"The allocator {allocator.name!r} compares all KV heads of a layer, and tensor parallelism gave some "
                "to other processes, which would have to make room for what is decided here. Use allocator='uniform' "
                "or one that shares out among layers, or keep the model in one process."
            )
        if isinstance(allocator, FixedAllocator) and allocator.divides_heads:
            wanted = self.table.heads[self.place]
            if wanted != kv_heads * processes:
                raise ValueError(
                    f"allocator={allocator.name!r} has shares for {wanted} KV heads of the layer that evicts as number "
                    f"{self.place} (counted from 0), and this model has {kv_heads * processes} there."
                )

    @property
    def tokens(self) -> Tensor | None:
        """`[B, 1 or heads here]` limits; None before the first decision."""
        tokens = self.table.tokens.get(self.place)
        return tokens if tokens is None or tokens.shape[1] == 1 else tokens[:, self._heads]

    @property
    def for_policy(self) -> int | Tensor:
        """The budget that policies see, see `ScoreContext.budget`."""
        if not self.table.unequal:
            return self.now.capacity
        tokens = self.tokens
        return self.table.mean.capacity if tokens is None else tokens[..., None]

    def max_tokens(self, pinned: Tensor, positions: Tensor, min_tokens: Tensor) -> Tensor | None:
        """`[B, S]` limit of each set from now on; None = the same for all.

        Args:
            pinned: `[B, S, tokens]` scores; inf = protected, -inf = a pad.
            positions: `[B, S, tokens]`.
            min_tokens: `[B]` smallest limit of each set, in whole blocks.
        """
        allocator, mean = self.table.allocator, self.table.mean
        if not self.table.unequal:
            return None
        if isinstance(allocator, HeadAllocator):
            counts = (positions[:, 0] >= 0).sum(-1)
            return allocator.within(pinned, mean, counts, min_tokens).to(positions.device)
        tokens = self.tokens
        if tokens is None:
            return torch.full(pinned.shape[:2], mean.capacity, device=positions.device)
        return tokens.to(positions.device).expand(-1, pinned.shape[1])

    def begin(self, columns: int) -> BlockBudget:
        """The layer is about to get its first tokens, so many columns. Returns its budget, in tokens."""
        self.now = self.now.resolve(columns)
        if self.table.mean.tokens is None:
            self.table.mean = self.now
        return self.now

    def give(self, mean: BlockBudget) -> None:
        """Set another budget. The table of the layer does not change yet."""
        self.mean = self.now = mean

    def resize(self, tokens: int) -> None:
        """Set the present budget of the longest row and head."""
        self.now = self.now.of(tokens)

    def clear(self) -> None:
        """Forget the tokens of all layers."""
        self.now = self.mean
        self.table.clear()

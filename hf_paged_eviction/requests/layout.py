"""How many tokens the sets of a request hold.

The budget of a request is a number of tokens for all layers and KV heads together. A *set* is a unit that evicts by
itself: a layer, or a KV head of a layer. Sets are numbered layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..allocators import FixedAllocator, Uniform
from ..table.budget import BlockBudget
from ..table.spans import Spans


@dataclass(frozen=True)
class Layout:
    """The sizes of all sets of a request.

    A set takes in tokens until it is full; after that, new tokens overwrite block after block.

    Attributes:
        limits: number of tokens that each set may hold.
        full_at: number of tokens seen by the request when each set becomes full.
    """

    limits: tuple[int, ...]
    full_at: tuple[int, ...]

    @classmethod
    def equal(cls, sets: int, capacity: int) -> "Layout":
        """The same number of tokens for each set."""
        limits = (capacity,) * sets
        return cls(limits, limits)

    def choosing(self, limits: Sequence[int], seen: int, new: int) -> "Layout":
        """The layout after each set has kept the best of its tokens and of `new` ones, with `seen` tokens seen."""
        candidates = [held + new for held in self.held(seen - new)]
        full_at = [seen + max(limit - count, 0) for limit, count in zip(limits, candidates, strict=True)]
        return Layout(tuple(limits), tuple(full_at))

    def of(self, sets: slice) -> "Layout":
        """The sizes of some sets."""
        return self if self.full_at is self.limits else Layout(self.limits[sets], self.full_at[sets])

    def held(self, seen: int) -> Sequence[int]:
        """Number of tokens in each set, after `seen` tokens."""
        if seen >= self._all_full_at:
            return self.limits
        if self.full_at is self.limits:
            return (seen,) * len(self.limits)
        return [limit - max(full_at - seen, 0) for limit, full_at in zip(self.limits, self.full_at, strict=True)]

    @cached_property
    def _all_full_at(self) -> int:
        return max(self.full_at)

    @cached_property
    def growing_until(self) -> int:
        """Number of tokens seen when the first set becomes full."""
        return min(self.full_at)

    def is_due(self, seen: int, block_size: int) -> bool:
        """Whether the next token begins a block in some set."""
        return any((seen - full_at) % block_size == 0 for full_at in self._ends)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(self.full_at)

    def in_step(self, block_size: int) -> bool:
        """Whether the blocks of all sets become full at the same time."""
        return len({full_at % block_size for full_at in self._ends}) == 1


class Shares:
    """Divides the budget of a request, as `PagedEvictionCache` does.

    Args:
        allocator: decides the shares.
        sizes: mean sizes of a set.
        layers: number of layers that evict.
        sets: number of sets of each layer.

    Attributes:
        sizes: see above.
        capacity: mean budget of a set in tokens.
        foreseen: length of the text for which shares are computed when single tokens have filled a request; None = its
            sets stay equal.
    """

    def __init__(self, allocator: FixedAllocator, sizes: BlockBudget, layers: int, sets: int) -> None:
        self._allocator, self._layers, self._sets = allocator, layers, sets
        self.sizes, self.capacity = sizes, sizes.capacity
        self.foreseen = None if allocator.foreseen is None else allocator.foreseen * self.capacity
        self._equal = [self.capacity] * (layers * sets) if isinstance(allocator, Uniform) else None

    def limits(self, seen: int, spans: Spans) -> list[int]:
        """Number of slots of each set, after so many tokens and with these protected spans."""
        if self._equal is not None:
            return self._equal
        return [tokens for share in self.of_layers([seen], spans) for tokens in share[0].expand(self._sets).tolist()]

    def of_layers(self, lengths: Sequence[int], spans: Spans) -> list[Tensor]:
        """Number of slots after each of these numbers of tokens: `[lengths, 1 or sets]` int64 for each layer."""
        budget = replace(self.sizes, spans=(spans,) if spans else ())
        return self._allocator.limits(budget, self._layers, torch.tensor(lengths, device="cpu"))

    def least(self, spans: Spans) -> int:
        """Smallest budget of a set in tokens, if sets have different budgets; else 0."""
        return 0 if self._equal is not None else replace(self.sizes, spans=(spans,)).smallest

"""The budgets of the sets of a request."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..allocators import FixedAllocator, Uniform
from ..allocators.by_layer import fixed_shares
from ..table.budget import BlockBudget
from ..table.spans import Spans


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
        return fixed_shares(self._allocator, self._layers, budget, torch.tensor(lengths, device="cpu"))

    def least(self, spans: Spans) -> int:
        """Smallest budget of a set in tokens, if sets have different budgets; else 0."""
        return 0 if self._equal is not None else replace(self.sizes, spans=(spans,)).smallest

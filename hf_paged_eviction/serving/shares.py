"""How many tokens each set of a request may hold."""

from dataclasses import replace

import torch

from ..allocators import FixedAllocator, Uniform
from ..allocators.by_layer import fixed_shares
from ..table.budget import BlockBudget
from ..table.spans import Spans


class Shares:
    """Shares the budget of a request out, as `PagedEvictionCache` does.

    Args:
        allocator: decides how.
        sizes: mean of a set.
        layers: that evict.
        sets: of each layer.

    Attributes:
        sizes: as given.
        capacity: tokens of a set, on average.
        foreseen: how many tokens a request is taken to become that single tokens have filled; None = its sets stay
            equal.
    """

    def __init__(self, allocator: FixedAllocator, sizes: BlockBudget, layers: int, sets: int) -> None:
        self._allocator, self._layers, self._sets = allocator, layers, sets
        self.sizes, self.capacity = sizes, sizes.capacity
        self.foreseen = None if allocator.foreseen is None else allocator.foreseen * self.capacity
        self._equal = [self.capacity] * (layers * sets) if isinstance(allocator, Uniform) else None

    def limits(self, seen: int, spans: Spans) -> list[int]:
        """Slots of each set, after so many tokens, where these are protected."""
        if self._equal is not None:
            return self._equal
        budget = replace(self.sizes, spans=(spans,) if spans else ())
        shares = fixed_shares(self._allocator, self._layers, budget, torch.tensor([seen]))
        return [int(tokens) for share in shares for tokens in share.expand(1, self._sets)[0].tolist()]

    def least(self, spans: Spans) -> int:
        """Fewest tokens that a set may hold, where sets hold different numbers; else 0."""
        return 0 if self._equal is not None else replace(self.sizes, spans=(spans,)).smallest

"""How many tokens each set of a request may hold."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..allocators import FixedAllocator, Uniform
from ..allocators.cascade import fixed_shares
from ..table.budget import BlockBudget
from ..table.spans import Spans

#: By tokens seen and what is protected, the slots of each set.
Limits = Callable[[int, Spans], list[int]]


def limits_of(allocator: FixedAllocator, sizes: BlockBudget, layers: int, sets: int) -> Limits:
    """What shares the budget of a request out, as `PagedEvictionCache` does.

    Args:
        sizes: mean of a set.
        layers: that evict.
        sets: of each layer.
    """
    equal = [sizes.capacity] * (layers * sets)

    def limits(seen: int, spans: Spans) -> list[int]:
        if isinstance(allocator, Uniform):
            return equal
        budget = replace(sizes, spans=(spans,) if spans else ())
        shares = fixed_shares(allocator, layers, budget, torch.tensor([seen]))
        return [int(tokens) for share in shares for tokens in share.expand(1, sets)[0].tolist()]

    return limits

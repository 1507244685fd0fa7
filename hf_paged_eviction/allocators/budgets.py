"""Budgets of the layers before the first forward."""

from collections.abc import Sequence

import torch

from ..table.budget import BlockBudget, whole_number
from .base import BudgetAllocator, FixedAllocator
from .given import Given
from .share import share_out
from .uniform import Uniform


def layer_budgets(sizes: BlockBudget, allocator: BudgetAllocator, layers: int) -> list[BlockBudget]:
    """Make the budget of each paged layer, as far as it is known before the first forward.

    Args:
        sizes: mean share.
        layers: paged layers of the model.
    """
    if isinstance(allocator, Given):
        return allocator.budgets(sizes, layers)
    return [sizes] * layers


def most_stored(sizes: BlockBudget, allocator: BudgetAllocator, layers: int, rows: int) -> int:
    """Tokens per row that the storage of all layers together may have room for.

    A layer's storage is as long as its longest row: in a batch, the first layers may be long for one row and the last
    ones for another.

    Args:
        sizes: mean share, in tokens.
        layers: paged layers of the model.
    """
    size, tokens = sizes.block_size, sizes.capacity
    if rows == 1 or not isinstance(allocator, FixedAllocator) or allocator.per_head or isinstance(allocator, Uniform):
        return tokens * layers
    weights = torch.tensor([allocator.weights(layers, tokens)], device="cpu")
    blocks = share_out(weights, tokens // size * layers, sizes.smallest // size)[0]
    return int((blocks * size).clamp_min(tokens).sum())


def listed_budgets(tokens: Sequence[int], allocator: BudgetAllocator) -> tuple[int, Given]:
    """The smallest budget of a user's list, and the list as an allocator.

    Raises:
        TypeError: an entry is no whole number.
        ValueError: the list is empty, or the user also chose an allocator.
    """
    if not isinstance(allocator, Uniform):
        raise ValueError(
            f"allocator= divides one budget: give a single number with {allocator.name!r}, or a list of budgets "
            "without an allocator."
        )
    if not tokens:
        raise ValueError("budget= is an empty list: give one number per paged layer.")
    counts = tuple(whole_number(f"budget[{at}]", count, 1) for at, count in enumerate(tokens))
    return min(counts), Given(counts)

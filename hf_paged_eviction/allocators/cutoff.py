"""The split for `Needs.cutoff`: the number of tokens that stay depends on the text."""

import torch
from torch import Tensor

from ..policies import EvictionPolicy
from ..policies.needs import Cutoff
from ..table.budget import BlockBudget
from .base import BudgetAllocator
from .split import BudgetSplit, LayerBudget
from .uniform import Uniform


class CutoffSplit(BudgetSplit):
    """Gives each row or KV head as many slots as it has tokens above the cutoff, at most the budget.

    Args:
        cutoff: of the policy.
        mean: budget of a layer.
    """

    unequal = selects = True

    def __init__(self, cutoff: Cutoff, mean: BlockBudget) -> None:
        super().__init__(mean)
        self._cutoff = cutoff

    def max_tokens(self, layer: LayerBudget, pinned: Tensor, positions: Tensor, min_tokens: Tensor) -> Tensor | None:
        """See `BudgetSplit.max_tokens`. Protected tokens stay whatever their score."""
        size, most = layer.mean.block_size, layer.mean.capacity
        staying = (pinned > self._cutoff.above).sum(-1) + self._cutoff.room
        blocks = torch.div(staying + size - 1, size, rounding_mode="floor")
        return blocks.maximum(min_tokens[:, None] // size).clamp_max(most // size) * size


def check_cutoff(sizes: BlockBudget, policy: EvictionPolicy, allocator: BudgetAllocator, static: bool) -> None:
    """Refuse options that a policy with a cutoff cannot be combined with.

    Raises:
        ValueError: with the way out.
    """
    if policy.needs.cutoff is None:
        return
    start = f"The policy {policy.label!r} decides how many tokens stay"
    if not isinstance(allocator, Uniform):
        raise ValueError(f"{start}, and so does allocator={allocator.name!r}: leave one of them out.")
    if sizes.tokens is None:
        raise ValueError(f"{start}, up to a budget: give budget= in tokens, not as a share or in bytes.")
    if static:
        raise ValueError(f"{start}, and the tensors of a static cache keep their size: leave keep_above= out.")

"""The KV heads of a layer share its budget, by the scores of their tokens."""

from torch import Tensor

from ..integration.heads import LocalHeads
from ..table.budget import BlockBudget
from .base import HeadAllocator
from .share import share_out
from .split import BudgetSplit, LayerBudget, refuse_processes


class HeadSplit(BudgetSplit):
    """Gives each row and KV head of a layer its own budget.

    Args:
        allocator: weighs the heads of a layer.
        mean: budget of a layer.
    """

    unequal = True

    def __init__(self, allocator: HeadAllocator, mean: BlockBudget) -> None:
        super().__init__(mean)
        self._allocator = allocator

    def check(self, layer: LayerBudget, kv_heads: int, local_heads: LocalHeads) -> None:
        """See `BudgetSplit.check`."""
        refuse_processes(str(self._allocator.name), "a layer", kv_heads, local_heads)

    def max_tokens(self, layer: LayerBudget, pinned: Tensor, positions: Tensor, min_tokens: Tensor) -> Tensor | None:
        """See `BudgetSplit.max_tokens`."""
        size, tokens, sets = layer.mean.block_size, layer.mean.capacity, positions.shape[1]
        weights = self._allocator.weights(pinned, tokens)
        most = -(-(positions[:, 0] >= 0).sum(-1) // size)
        blocks = share_out(weights, tokens // size * sets, min_tokens // size, most)
        return blocks.to(positions.device) * size

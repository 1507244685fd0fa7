"""A share for every layer, given by the user."""

from dataclasses import dataclass

from ..table.budget import BlockBudget
from .base import BudgetAllocator


@dataclass(frozen=True)
class Given(BudgetAllocator):
    """The user's own budgets: `PagedEvictionCache(budget=[...])` makes this allocator.

    Args:
        tokens: number of tokens of each paged layer.
    """

    tokens: tuple[int, ...]

    def budgets(self, sizes: BlockBudget, layers: int) -> list[BlockBudget]:
        """Make one budget per paged layer.

        Raises:
            TypeError, ValueError: the list does not fit the model, or a number does not fit the block size.
        """
        if len(self.tokens) != layers:
            raise ValueError(
                f"{len(self.tokens)} budgets were given for the {layers} layers of this model that are paged. Give one "
                "for each, or a single number for all."
            )
        rest = (sizes.block_size, sizes.protected, sizes.recent, sizes.spans)
        return [BlockBudget.validate(tokens, *rest) for tokens in self.tokens]

"""A share for every layer, given by the user."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..table.budget import BlockBudget, whole_number
from .base import BudgetAllocator
from .uniform import Uniform


@dataclass(frozen=True)
class Given(BudgetAllocator):
    """The user's own budgets: `PagedEvictionCache(budget=[...])` makes this allocator.

    Args:
        tokens: number of tokens of each paged layer.
    """

    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Sequence[int], allocator: BudgetAllocator) -> "Given":
        """A user's list as an allocator.

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
        return cls(tuple(whole_number(f"budget[{at}]", count, 1) for at, count in enumerate(tokens)))

    def budgets(self, mean: BlockBudget, layers: int) -> list[BlockBudget]:
        """Make one budget per paged layer.

        Raises:
            TypeError, ValueError: the list does not fit the model, or a number does not fit the block size.
        """
        if len(self.tokens) != layers:
            raise ValueError(
                f"{len(self.tokens)} budgets were given for the {layers} layers of this model that are paged. Give one "
                "for each, or a single number for all."
            )
        rest = (mean.block_size, mean.protected, mean.recent, mean.spans)
        return [BlockBudget.validate(tokens, *rest) for tokens in self.tokens]

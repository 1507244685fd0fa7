"""A budget for each layer."""

from dataclasses import dataclass

import torch

from hf_paged_eviction.internals import BlockBudget, BudgetAllocator, share_out, whole_number


@dataclass(frozen=True)
class LayerTokens(BudgetAllocator):
    """Divides the budget among the layers in given proportions, in whole blocks. All heads of a layer hold the same.

    Args:
        tokens: of each paged layer. Budgets are these numbers where `budget=` is their mean, otherwise in proportion;
            () = all the same.

    Raises:
        TypeError, ValueError: these are no positive whole numbers. `budgets` raises ValueError if there is another
            number of layers, or the budget is a share or bytes.
    """

    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, tuple):
            raise TypeError(f"layer_tokens: tokens must be a tuple with a number for each layer, got {self.tokens!r}.")
        for at, count in enumerate(self.tokens):
            whole_number(f"tokens[{at}]", count, 1)

    def budgets(self, mean: BlockBudget, layers: int) -> list[BlockBudget]:
        """See `BudgetAllocator.budgets`."""
        if not self.tokens:
            return [mean] * layers
        if len(self.tokens) != layers:
            raise ValueError(f"layer_tokens has {len(self.tokens)} numbers, and the model {layers} paged layers.")
        if mean.tokens is None:
            raise ValueError(f"layer_tokens divides budget= in tokens, got {mean.label!r}.")
        size, weights = mean.block_size, torch.tensor([self.tokens])
        blocks = share_out(weights, mean.capacity // size * layers, mean.smallest // size)
        return [mean.of(int(count) * size) for count in blocks[0]]

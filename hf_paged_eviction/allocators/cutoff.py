"""As many tokens as score above a number: the text decides how much of it stays."""

import torch
from torch import Tensor

from ..policies import EvictionPolicy
from ..policies.needs import Cutoff
from ..table.budget import BlockBudget
from .base import BudgetAllocator
from .quota import Quota
from .uniform import Uniform


class CutoffQuota(Quota):
    """A number for each row or KV head, of its own tokens alone; the budget is the most.

    Args:
        asked: see `Quota`.
        cutoff: the number that tokens have to score above, and the room on top.
    """

    unequal = selects = True

    def __init__(self, asked: BlockBudget, cutoff: Cutoff) -> None:
        super().__init__(asked)
        self._cutoff = cutoff

    def room(self) -> int | Tensor:
        """See `Quota.room`."""
        return self.asked.capacity

    def limits(self, pinned: Tensor, positions: Tensor, least: Tensor) -> Tensor | None:
        """See `Quota.limits`. Protected tokens stay in any case."""
        asked = self.asked
        size = asked.block_size
        staying = (pinned > self._cutoff.above).sum(-1) + self._cutoff.room
        blocks = torch.div(staying + size - 1, size, rounding_mode="floor")
        return blocks.maximum(least[:, None] // size).clamp_max(asked.capacity // size) * size


def check_cutoff(sizes: BlockBudget, policy: EvictionPolicy, allocator: BudgetAllocator, static: bool) -> None:
    """Refuse what a policy that decides how many tokens stay does not go together with.

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

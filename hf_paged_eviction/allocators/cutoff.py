"""As many tokens as score above a number: the text decides how much of it stays."""

import torch
from torch import Tensor

from ..policies.needs import Cutoff
from ..table.budget import BlockBudget
from .quota import Quota


class CutoffQuota(Quota):
    """A number for each row or KV head, of its own tokens alone; the budget is the most.

    Args:
        cutoff: the number that tokens have to score above, and the room on top.
    """

    unequal = True

    def __init__(self, cutoff: Cutoff) -> None:
        super().__init__()
        self._cutoff = cutoff

    def room(self, asked: BlockBudget, present: BlockBudget) -> int | Tensor:
        """See `Quota.room`."""
        return asked.capacity

    def limits(self, asked: BlockBudget, pinned: Tensor, positions: Tensor) -> Tensor | None:
        """See `Quota.limits`. Protected tokens stay in any case."""
        size = asked.block_size
        staying = (pinned > self._cutoff.above).sum(-1) + self._cutoff.room
        blocks = torch.div(staying + size - 1, size, rounding_mode="floor")
        return blocks.clamp(asked.smallest // size, asked.capacity // size) * size

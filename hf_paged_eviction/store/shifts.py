"""How far the states of a store are turned when attention reads them."""

import torch
from torch import Tensor


class Shifts:
    """How many positions forward the token in each slot stands for attention. A token that came since the shifts were
    last set stands where it came: 0.

    Attributes:
        by: `[batch, sets, slots]` int32, written to in place.

    Args:
        by: see above.
    """

    dtype = torch.int32

    def __init__(self, by: Tensor) -> None:
        self.by = by

    def of_first(self, held: int | None) -> Tensor:
        """`[batch, sets, held]`, a view; None = of all slots."""
        return self.by if held is None else self.by[:, :, :held]

    def append(self, start: int, count: int) -> None:
        """New tokens came to the slots from `start` on."""
        self.by.narrow(2, start, count).zero_()

    def overwrite(self, slot: Tensor, real: Tensor | None) -> None:
        """A token came to the slot `[batch, sets, 1]`; not in rows that `real` `[batch, 1]` says are pads."""
        slot = slot.expand(-1, self.by.shape[1], -1)
        new = 0 if real is None else self.by.gather(2, slot).masked_fill(real[:, None], 0)
        self.by.scatter_(2, slot, new)

    def write(self, slot: Tensor) -> None:
        """As `overwrite`, to the slot `[batch, sets]`, for compiled code."""
        rows, sets = self.by.shape[:2]
        row, one = torch.arange(rows, device=slot.device)[:, None], torch.arange(sets, device=slot.device)
        # Not scatter_, for which inductor copies the whole storage.
        self.by.index_put_((row, one, slot), self.by.new_zeros(()))

    def reorder(self, order: Tensor) -> None:
        """The first slots were brought into another order, `[batch, sets, held]`."""
        order = order.expand(-1, self.by.shape[1], -1)
        self.by[:, :, : order.shape[-1]] = self.by.gather(2, order)

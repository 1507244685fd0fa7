"""The slots of the next token in compiled steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..store.room import static_zeros
from ..table.table import BlockTable


class NextSlots:
    """The slots of the next token for layers that take compiled steps together, in tensors with fixed addresses.

    Attributes:
        slots: `[layers * B, S, 1]` int64, with the rows of all layers, layer by layer.
        all_real: whether all usable slots hold real tokens, so that a step needs no mask. It is decided after a forward
            of several tokens and valid until the next one, because a graph has either a mask or none.
        visible: `[layers * B, S, C]` bool, slots with real tokens; None if the model's mask is used, or if all slots
            hold real tokens.
        filling: the same; None also if all usable slots hold real tokens.

    Args:
        table: table of these layers.
        old: object of an earlier run, whose tensors are reused if they fit.
        own_mask: whether the model's mask does not fit these layers.
    """

    def __init__(self, table: BlockTable, old: "NextSlots | None", own_mask: bool = False) -> None:
        shape = (*table.phase.full_at.shape, 1)
        self.slots: Tensor = _taken_over(None if old is None else old.slots, shape, table.device)
        self.all_real = table.all_used if own_mask else table.full and table.all_real
        self.visible: Tensor | None = None
        if own_mask and not (table.full and table.all_real):
            visible = _taken_over(
                None if old is None else old.visible, (*shape[:2], table.capacity), table.device, torch.bool
            )
            visible[..., : table.held] = table.used
            visible[..., table.held :] = False
            self.visible = visible
        self.filling = None if self.all_real else self.visible

    def prepare(self, table: BlockTable, choose_victims: Callable[[], None]) -> None:
        """Choose victims that are due, and compute the slots of the next token."""
        if not table.counters.overwriting:
            self.slots.fill_(table.held)
        else:
            if table.victims_due:
                choose_victims()
            self.slots.copy_(table.next_slots())
        if self.filling is not None:
            self.filling.scatter_(2, self.slots, True)


def _taken_over(old: Tensor | None, shape: tuple[int, ...], device: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """The tensor of an earlier run, if it fits, or a new one; at a fixed address."""
    fits = old is not None and (tuple(old.shape), old.device) == (shape, device)
    return old if old is not None and fits else static_zeros(shape, device, dtype)

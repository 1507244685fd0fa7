"""Where layers that take compiled steps together write their next token."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..store.room import static_zeros
from ..table.table import BlockTable


class NextSlots:
    """Where layers that take every step together write the next token; of a fixed address, for compiled code.

    Attributes:
        slots: `[layers * B, S, 1]` int64; rows are those of all layers, layer by layer.
        all_real: whether all slots that a set may use hold real tokens, so that a step needs no mask. Decided after a
            forward of several tokens and kept until the next, because a graph has either a mask or none.
        visible: `[layers * B, S, C]` bool, which slots hold real tokens, where the model's mask does not say it; None =
            it does, or all do.
        filling: the same; None also where all slots that a set may use hold real tokens.

    Args:
        table: of all these layers.
        old: of an earlier run, whose tensors are taken over if they fit.
        own_mask: whether the model's mask does not fit these layers.
    """

    def __init__(self, table: BlockTable, old: "NextSlots | None", own_mask: bool = False) -> None:
        shape = (*table.phase.full_at.shape, 1)
        self.slots: Tensor = _taken_over(None if old is None else old.slots, shape, table.device)
        self.all_real = table.full and (table.empty == 0 if own_mask else table.all_real)
        self.visible: Tensor | None = None
        if own_mask and not (table.full and table.all_real):
            visible = _taken_over(
                None if old is None else old.visible, (*shape[:2], table.capacity), table.device, torch.bool
            )
            visible[..., : table.held] = table.positions >= 0
            visible[..., table.held :] = False
            self.visible = visible
        self.filling = None if self.all_real else self.visible

    def prepare(self, table: BlockTable, choose_victims: Callable[[], None]) -> None:
        """Choose victims where they are due, and say where the next token goes."""
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

"""Held states turned to other positions, for attention."""

import torch
from torch import Tensor

from ..integration.rotary import Rotary
from .tensors import slot_index


class Turning:
    """What a store needs to turn what it holds: states rest as they came, and attention reads a turned copy.

    The copy costs memory, half as much again as keys and values without it. In return a decoded token turns nothing:
    the copy is made anew once per block, always from what came, so that no rounding adds up however long the text is.
    Before anything was evicted there is no copy. A store of few bits makes a new tensor at each read
    anyway, and turns that instead: see `CodedStore`.

    Attributes:
        rotary: how the model turns these states.
        of: which states turn, 0 = keys, 1 = values (the rotary part of latents stands there).
        turned: `[batch, kv_heads, slots, dim]` as attention sees them; None = as they came.

    Args:
        rotary, of: see above.
    """

    def __init__(self, rotary: Rotary, of: int = 0) -> None:
        self.rotary, self.of = rotary, of
        self.turned: Tensor | None = None

    def check(self, states: tuple[Tensor, Tensor]) -> None:
        """Look at the first keys and values.

        Raises:
            ValueError: they are no latents, though the model's configuration speaks of them.
        """
        if self.of == 1 and states[1].shape[1] != 1:
            raise ValueError(
                'positions="cache" turns the rotary part of latents (MLA), but this transformers release expands them '
                f"before it caches them ({states[1].shape[1]} heads instead of one). Upgrade transformers, or use "
                'positions="text".'
            )

    def turn(self, states: Tensor, shifts: Tensor) -> None:
        """Make the copy of these states anew, each turned by its shift `[batch, sets, slots]`."""
        if self.turned is not None:
            self.rotary.rotate_by_into(self.turned, states, shifts)

    def append(self, start: int, states: tuple[Tensor, Tensor]) -> None:
        """New keys and values, which stand where they came, to the slots from `start` on."""
        if self.turned is not None:
            new = states[self.of]
            self.turned.narrow(2, start, new.shape[2]).copy_(new)

    def overwrite(self, slot: Tensor, states: tuple[Tensor, Tensor], real: Tensor | None) -> None:
        """A new key and value to the slot `[batch, sets, 1]`; not in rows that `real` `[batch, 1]` says are pads."""
        if self.turned is not None:
            index = slot_index(slot, self.turned)
            new = states[self.of]
            if real is not None:
                new = torch.where(real[:, None, :, None], new, self.turned.gather(2, index))
            self.turned.scatter_(2, index, new)

    def move_to(self, device: torch.device | str | None) -> None:
        """To another device."""
        if self.turned is not None:
            self.turned = self.turned.to(device, non_blocking=True)

"""Held states turned to other positions, for attention."""

from dataclasses import dataclass

from torch import Tensor

from ..integration.rotary import Rotary


@dataclass(frozen=True)
class Turning:
    """What a store needs to turn what it holds: states rest as they came, and attention reads a turned copy.

    The copy costs memory, half as much again as keys and values without it. In return a decoded token turns nothing:
    the copy is made anew once per block, always from what came, so that no rounding adds up however long the text is.
    Before anything was evicted there is no copy. A store of few bits makes a new tensor at each read
    anyway, and turns that instead: see `CodedStore`.

    Attributes:
        rotary: how the model turns these states.
        of: which states turn, 0 = keys, 1 = values (the rotary part of latents stands there).
    """

    rotary: Rotary
    of: int = 0

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

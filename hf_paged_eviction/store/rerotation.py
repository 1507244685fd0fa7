"""Held keys turned to other positions, for attention."""

from dataclasses import dataclass

from ..integration.rotary import Rotary


@dataclass(frozen=True)
class Rerotation:
    """What a store needs to turn the keys that it holds: they rest as they came, and attention reads a turned copy.

    The copy costs memory, half as much again as keys and values without it. In return a decoded token turns nothing:
    the copy is made anew once per block, always from what came, so that no rounding adds up however long the text is.
    Before anything was evicted there is no copy.

    Attributes:
        rotary: how the model turns these keys.
    """

    rotary: Rotary

"""Rotate held keys to other positions, for attention."""

from dataclasses import dataclass

from ..integration.rotary import Rotary


@dataclass(frozen=True)
class Rerotation:
    """Rotates the keys of a store to other positions. The store keeps the original keys, and attention reads a rotated
    copy.

    The copy takes half as much memory as keys and values. In return a decoded token rotates nothing: the copy is
    renewed once per block, always from the original keys, so rounding errors do not add up. There is no copy until
    something is evicted.

    Attributes:
        rotary: rotation of these keys in the model.
    """

    rotary: Rotary

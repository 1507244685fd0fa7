"""Disposals by name."""

from ..naming import Kind, Registry
from .base import Disposal, Drop

#: The registry of disposals.
DISPOSALS: Registry[Disposal] = Registry(
    Kind("disposal", "disposals", "drop"),
    Disposal,  # type: ignore[type-abstract]
)
register_disposal, available_disposals, make_disposal = DISPOSALS.register, DISPOSALS.names, DISPOSALS.make
register_disposal("drop")(Drop)

"""Tokens that leave are gone."""

from dataclasses import dataclass

from ..store.store import Store
from .base import Disposal, Outlet
from .registry import register_disposal


@register_disposal("drop")
@dataclass(frozen=True)
class Drop(Disposal):
    """Tokens that leave are gone: their slots are overwritten."""

    def outlet(self, store: Store) -> Outlet:
        """See `Disposal.outlet`."""
        return Outlet()

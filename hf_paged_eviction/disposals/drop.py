"""Drop: evicted tokens are overwritten."""

from dataclasses import dataclass

from .base import Disposal, EvictionAction, Site
from .registry import register_disposal


@register_disposal("drop")
@dataclass(frozen=True)
class Drop(Disposal):
    """Evicted tokens are gone: new tokens overwrite their slots."""

    def action(self, site: Site) -> EvictionAction:
        """See `Disposal.action`."""
        return EvictionAction()

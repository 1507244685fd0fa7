"""The cache in a line, and layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.naming.sizes import readable_bytes


@dataclass(frozen=True)
class Footprint:
    """Tokens per layer, and bytes of keys and values of all layers.

    Attributes:
        seen, held, budget: tokens; means over the layers that evict.
        kv_bytes: of this cache on the model's device, in use or not.
        full_bytes: what `DynamicCache` would hold of the same tokens.
    """

    seen: int
    held: int
    budget: int
    kv_bytes: int
    full_bytes: int

    @classmethod
    def of(cls, cache: PagedEvictionCache) -> Footprint:
        """Read a cache; synchronises an accelerator."""
        stats, paged = cache.stats(), [layer for _, layer in cache.paged_layers]
        full = sum(layer.storage_bytes // layer.keys.shape[2] for layer in paged if layer.keys is not None) * stats.seen
        return cls(
            seen=stats.seen,
            held=round(sum(layer.held for layer in stats.layers) / len(paged)),
            budget=round(sum(layer.budget or 0 for layer in stats.layers) / len(paged)),
            kv_bytes=stats.device_bytes,
            full_bytes=full + stats.other_bytes,
        )

    def line(self, rate: float | None = None, doing: str = "") -> Text:
        """Tokens per layer, bytes of all layers, and tokens per second."""
        parts = [
            doing,
            f"{self.held:,}/{self.budget:,} held",
            f"{self.seen - self.held:,} evicted",
            f"{self.seen:,} seen",
            f"KV {readable_bytes(self.kv_bytes)}, full cache {readable_bytes(self.full_bytes)}",
            f"{rate:,.0f} tokens/s" if rate else "",
        ]
        return Text(", ".join(filter(None, parts)), style="dim")

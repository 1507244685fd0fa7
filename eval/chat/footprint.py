"""What a conversation's cache holds, against what a full cache would."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged_eviction import PagedEvictionCache


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

    @property
    def evicted(self) -> int:
        """Tokens seen and no longer held."""
        return self.seen - self.held

"""The cache in a line, and layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.text import Text

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.naming.sizes import readable_bytes

from ..summaries.table import Table, simple_table


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

    def line(self, rate: float | None = None, doing: str = "") -> Text:
        """Tokens per layer, bytes of all layers, and tokens per second."""
        parts = [
            doing,
            f"{self.held:,}/{self.budget:,} held",
            f"{self.evicted:,} evicted",
            f"{self.seen:,} seen",
            f"KV {readable_bytes(self.kv_bytes)}, full cache {readable_bytes(self.full_bytes)}",
            f"{rate:,.0f} tokens/s" if rate else "",
        ]
        return Text(", ".join(filter(None, parts)), style="dim")


def layer_table(cache: PagedEvictionCache) -> Table:
    """`cache.stats()` of every layer that evicts, and of all."""
    stats = cache.stats()
    names = {name: name for name in ("seen", "held", "budget")}
    names |= {"evicted_tokens": "evicted", "evicted_blocks": "blocks"}
    layers: list[tuple[str, Any]] = [*((str(each.layer_idx), each) for each in stats.layers), ("all", stats)]
    rows = [
        (title, *(_number(getattr(of, name)) for name in names), readable_bytes(of.storage_bytes))
        for title, of in layers
    ]
    beside = {
        "in layers that hold a window or a state anyway": stats.other_bytes,
        "beside the slots": stats.summary_bytes,
        "in host memory": stats.host_bytes,
    }
    found = [f"{readable_bytes(count)} {where}" for where, count in beside.items() if count]
    return simple_table("", ("layer", *names.values(), "bytes"), rows, f"and {', '.join(found)}" if found else "")


def _number(value: int | None) -> str:
    return str(value) if value is None else f"{value:,}"

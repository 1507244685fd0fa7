"""The cache in a line, and layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.stats import readable_bytes


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


_BAR = 12


def status_text(footprint: Footprint, rate: float | None = None) -> str:
    """Tokens per layer, bytes of all layers, and tokens per second."""
    parts = [
        f"{footprint.held:,}/{footprint.budget:,} held",
        f"{footprint.evicted:,} evicted",
        f"{footprint.seen:,} seen",
        f"KV {readable_bytes(footprint.kv_bytes)}, full cache {readable_bytes(footprint.full_bytes)}",
    ]
    return ", ".join(parts if rate is None else [*parts, f"{rate:,.0f} tokens/s"])


def status_line(footprint: Footprint, rate: float | None = None, doing: str | None = None) -> RenderableType:
    """A bar of the budget and what it means."""
    text = status_text(footprint, rate)
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        ProgressBar(total=max(footprint.budget, 1), completed=footprint.held, width=_BAR),
        Text(text if doing is None else f"{doing}, {text}", style="dim"),
    )
    return grid


def layer_table(cache: PagedEvictionCache) -> RenderableType:
    """`cache.stats()` of every layer that evicts."""
    stats = cache.stats()
    table = Table(box=None, header_style="bold", show_footer=True)
    rows = [
        (each.layer_idx, each.seen, each.held, each.budget, each.evicted_tokens, each.evicted_blocks)
        for each in stats.layers
    ]
    totals = ("all", stats.seen, stats.held, stats.budget, stats.evicted_tokens, stats.evicted_blocks)
    names = ("layer", "seen", "held", "budget", "evicted", "blocks")
    for name, total in zip(names, totals, strict=True):
        table.add_column(name, _number(total), justify="right")
    table.add_column("bytes", readable_bytes(stats.storage_bytes), justify="right")
    for row, each in zip(rows, stats.layers, strict=True):
        table.add_row(*map(_number, row), readable_bytes(each.storage_bytes))
    beside = {
        "in layers that hold a window or a state anyway": stats.other_bytes,
        "beside the slots": stats.summary_bytes,
        "in host memory": stats.host_bytes,
    }
    found = [f"{readable_bytes(count)} {where}" for where, count in beside.items() if count]
    table.caption = f"and {', '.join(found)}" if found else None
    return table


def _number(value: int | str | None) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)

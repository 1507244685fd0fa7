"""What a cache holds and what it has evicted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerStats:
    """What one paged layer holds and has evicted.

    Attributes:
        layer_idx: index in the model.
        seen: number of tokens seen per row, pads included.
        held: number of tokens held per row and KV head, pads included. The mean, if rows or heads hold different
            numbers.
        budget: most tokens that the layer may hold per row and KV head. None while an allocator waits for the prompt.
            The mean, if rows or heads have different budgets.
        evicted_tokens: real tokens that were seen and are no longer held in the slots, summed over rows.
        evicted_blocks: blocks that were overwritten during decoding, summed over rows. With separate heads each KV head
            counts its own.
        storage_bytes: bytes of the storage of keys and values, used or not.
        storage_parts: the same by purpose: keys and values, or, with `bits=`, codes, levels, positions and tokens that
            are not rounded.
        summary_bytes: bytes that `disposal=` keeps on the device beside the storage.
    """

    layer_idx: int
    seen: int
    held: int
    budget: int | None
    evicted_tokens: int
    evicted_blocks: int
    storage_bytes: int
    summary_bytes: int = 0
    storage_parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheStats:
    """What all paged layers hold. Counts of evictions and bytes are sums over the layers.

    Attributes:
        seen: number of tokens seen per row, pads included.
        mean_held: `LayerStats.held`, averaged over the layers.
        largest_held: `LayerStats.held` of the layer that holds most. With budgets of layers or heads it may be several
            times `budget`.
        budget: `LayerStats.budget`, averaged over the layers and rounded down. None while a layer has none.
        other_bytes: bytes of keys and values in layers that are not paged (sliding windows and the like).
        layers: one entry per paged layer; `print` leaves them out. Fields that are not listed here have the names and
            meanings of `LayerStats`.
    """

    seen: int
    mean_held: float
    largest_held: int
    budget: int | None
    evicted_tokens: int
    evicted_blocks: int
    storage_bytes: int
    other_bytes: int
    layers: tuple[LayerStats, ...] = field(repr=False)
    summary_bytes: int = 0
    storage_parts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Sequence[LayerStats], other_bytes: int) -> "CacheStats":
        """Combine the stats of layers."""
        budgets = [layer.budget for layer in layers if layer.budget is not None]
        return cls(
            seen=max((layer.seen for layer in layers), default=0),
            mean_held=sum(layer.held for layer in layers) / max(1, len(layers)),
            largest_held=max((layer.held for layer in layers), default=0),
            budget=sum(budgets) // len(budgets) if budgets and len(budgets) == len(layers) else None,
            evicted_tokens=sum(layer.evicted_tokens for layer in layers),
            evicted_blocks=sum(layer.evicted_blocks for layer in layers),
            storage_bytes=sum(layer.storage_bytes for layer in layers),
            other_bytes=other_bytes,
            summary_bytes=sum(layer.summary_bytes for layer in layers),
            storage_parts=dict(sum((Counter(layer.storage_parts) for layer in layers), Counter())),
            layers=tuple(layers),
        )

    @property
    def device_bytes(self) -> int:
        """Bytes on the model's device: `storage_bytes`, `summary_bytes` and `other_bytes` together."""
        return self.storage_bytes + self.summary_bytes + self.other_bytes

"""How many blocks a request keeps in each layer. Layers that keep as many share a table of blocks."""

import weakref
from typing import Any

import numpy as np
from vllm.utils.math_utils import cdiv

from hf_paged_eviction.internals import Shares

from .heads import blocks_for
from .settings import Settings, latest

#: Most groups. Each has a table of blocks of its own; a few hold nearly as little as one for each layer.
_MOST_GROUPS = 6

_latest: "tuple[weakref.ref[Any], Grouping] | None" = None


class Grouping:
    """The blocks that a request keeps, by layer.

    Args:
        config: `VllmConfig`.
        settings: what requests get.
    """

    def __init__(self, config: Any, settings: Settings) -> None:
        self._settings, self._in_flight = settings, config.max_in_flight_tokens
        self._longest = config.model_config.max_model_len
        self._heads = config.model_config.get_total_num_kv_heads() if settings.separate else 1
        self._parts = config.parallel_config.tensor_parallel_size if settings.separate else 1
        self._calls = 0
        self._kept: dict[int, list[int]] = {}  # by block size, then place

    def next(self, spec: Any) -> dict[str, Any]:
        """The fields of `EvictionSpec` of the next layer."""
        layers = [*self._settings.layers]
        layer = layers[self._calls % len(layers)]
        self._calls += 1
        unequal = self._settings.unequal
        return {
            "kept": self.kept(layer, spec),
            "sizes": None if unequal else self._settings.sizes,
            "reserve": self._settings.reserve,
            "in_flight": self._in_flight,
        }

    def kept(self, layer: int, spec: Any) -> int:
        """Blocks that a request keeps in the layer with this index in the model."""
        if not self._settings.unequal:
            return int(cdiv(self._settings.budget, spec.block_size))
        if spec.block_size not in self._kept:
            self._kept[spec.block_size] = self._of_groups(spec.block_size)
        return self._kept[spec.block_size][[*self._settings.layers].index(layer)]

    def _of_groups(self, block_size: int) -> list[int]:
        """By place: as many blocks as the largest layer of its group needs, for any length of text."""
        needed = self._needed(block_size)
        groups = next(count for count in range(_MOST_GROUPS, 0, -1) if len(needed) % count == 0)
        order, size = np.argsort(needed, kind="stable"), len(needed) // groups
        kept = [0] * len(needed)
        for at in range(0, len(needed), size):
            members = order[at : at + size]
            for place in members:
                kept[place] = int(needed[members].max())
        return kept

    def _needed(self, block_size: int) -> Any:
        settings = self._settings
        every = range(settings.budget + 1, max(self._longest, settings.budget + 1) + 1)
        # Shares of heads follow the share of the text that is kept, and a table ends at the smallest that was measured.
        shares = Shares(settings.allocator, settings.sizes, len(settings.layers), 1)
        lengths = sorted({*every[:: max(1, len(every) // 512)], every[-1], shares.foreseen or every[0]})
        # Until a request has filled its budget, its sets are equal.
        most = np.full(len(settings.layers), cdiv(settings.budget, block_size), dtype=np.int64)
        for length in lengths:
            for place, share in enumerate(shares.of_layers(length, ())):
                own = share.expand(self._heads).numpy() if len(share) == 1 else share.numpy()
                for part in np.split(own, min(self._parts, len(own))):
                    most[place] = max(most[place], blocks_for(part[None], block_size))
        return most


def grouping_of() -> "Grouping | None":
    """The grouping of the server whose model was made last in this process; None if it does not evict."""
    global _latest
    config, settings = latest()
    if config is None or settings is None:
        return None
    if _latest is None or _latest[0]() is not config:
        _latest = weakref.ref(config), Grouping(config, settings)
    return _latest[1]

"""How many blocks a request keeps in each layer. Layers that keep as many share a table of blocks."""

import weakref
from itertools import cycle
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hf_paged_eviction.internals import Shares

from .settings import Settings
from .spec import EvictionSpec

Needs = tuple[tuple[int, int], ...]

#: Most groups. Each has a table of blocks of its own; a few hold nearly as little as one for each layer.
_MOST_GROUPS = 6
#: Lengths of text for which shares are reckoned.
_SAMPLES = 512

_latest: "tuple[weakref.ref[Any], Grouping] | None" = None


class Grouping:
    """The specs of layers, by how many blocks a request needs there.

    Args:
        config: `VllmConfig`.
        settings: what requests get.
    """

    def __init__(self, config: Any, settings: Settings) -> None:
        self._settings, self._longest = settings, config.model_config.max_model_len
        self._heads = config.model_config.get_total_num_kv_heads() if settings.separate else 1
        self._parts = config.parallel_config.tensor_parallel_size if settings.separate else 1
        self._shares = Shares(settings.allocator, settings.sizes, len(settings.layers), self._heads)
        self._fields = {
            "sizes": settings.sizes,
            "foreseen": self._shares.foreseen,
            "reserve": settings.reserve,
            "in_flight": config.max_in_flight_tokens,
        }
        self._coming = cycle(settings.layers)
        self._needs: dict[int, dict[int, Needs]] = {}  # by block size

    def next(self, spec: FullAttentionSpec) -> EvictionSpec:
        """The spec of the next layer."""
        return EvictionSpec.of(spec, needs=self.needs(spec.block_size)[next(self._coming)], **self._fields)

    def needs(self, block_size: int) -> dict[int, Needs]:
        """See `EvictionSpec.needs`, by index of the layer in the model."""
        if block_size not in self._needs:
            unequal = self._settings.unequal
            every = self._of_groups(block_size) if unequal else [()] * len(self._settings.layers)
            self._needs[block_size] = dict(zip(self._settings.layers, every, strict=True))
        return self._needs[block_size]

    def _of_groups(self, block_size: int) -> list[Needs]:
        """By place: what the layers of its group need, those that need most in one group."""
        budget = self._settings.budget
        last = max(self._longest, self._shares.foreseen or 0) + 1
        lengths = np.unique(np.linspace(budget, last, min(_SAMPLES, last - budget + 1), dtype=np.int64))
        parts = np.array_split(lengths, len(lengths) // 128 + 1)  # so many at once
        needed = np.concatenate([self._blocks(part, block_size) for part in parts], axis=1)  # [layers, lengths]
        if len(lengths) <= last - budget:  # between two lengths, heads are rounded in other ways
            needed = np.maximum(needed, np.roll(needed, -1, axis=1)) + 1
        groups = next(count for count in range(_MOST_GROUPS, 0, -1) if len(needed) % count == 0)
        of_layers: list[Needs] = [()] * len(needed)
        for members in np.argsort(needed.max(1), kind="stable").reshape(groups, -1):
            most = needed[members].max(0)
            changes = [0, *(np.diff(most).nonzero()[0] + 1)]
            for place in members:
                of_layers[place] = tuple((int(lengths[at]), int(most[at])) for at in changes)
        return of_layers

    def _blocks(self, lengths: Any, block_size: int) -> Any:
        """`[layers, lengths]`, blocks that hold the pages of the sets of each layer, in the process that needs most."""
        blocks = []
        for share in self._shares.of_layers(lengths, ()):
            pages = -(-share.expand(-1, self._heads).numpy() // block_size)
            parts = np.split(pages, self._parts if self._heads >= self._parts else 1, axis=1)
            blocks.append(np.max([-(-part.sum(1) // part.shape[1]) for part in parts], axis=0))
        return np.stack(blocks)


def grouping_of(config: Any, settings: Settings) -> Grouping:
    """The grouping of the server whose model was made last in this process."""
    global _latest
    if _latest is None or _latest[0]() is not config:
        _latest = weakref.ref(config), Grouping(config, settings)
    return _latest[1]

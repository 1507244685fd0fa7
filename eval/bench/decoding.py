"""Decode steps of all variants, for one budget and batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from ..errors import reason
from ..models.device import is_out_of_memory
from ..running.efficiency import kv_bytes
from ..running.memory import free_memory
from ..store.results import Row
from .decoder import Decoder, compiled, fill, graphs, layer_shapes, room_for_graphs
from .rows import FAILED, MEASURED, BenchKey, interleaved, make_row
from .settings import BenchSettings
from .steps import growth, measure_shares, state_bytes, weight_bytes
from .variants import COMPILED, FLOORS, make_cache

#: Steps of the runs beside the timings, for caches that only grow.
_FEW = 2


def decode_keys(settings: BenchSettings, budget: int, batch: int) -> list[BenchKey]:
    """The rows of a group: every variant at every context, the floors once."""
    return [
        BenchKey(name, context, budget, batch)
        for name in settings.variants
        for context in ((None,) if name in FLOORS else settings.contexts)
    ]


class Group:
    """All rows of one budget and batch size, whose caches are alive at the same time.

    Args:
        model: on its device.
        bandwidth: bytes per second.
        tick: told what was finished.
    """

    def __init__(
        self,
        model: Any,
        settings: BenchSettings,
        keys: Sequence[BenchKey],
        bandwidth: float,
        tick: Callable[[str], None],
    ) -> None:
        self.model, self.settings, self.keys, self.bandwidth, self.tick = model, settings, keys, bandwidth, tick
        self.batch = keys[0].batch_size
        self.shapes = layer_shapes(model)
        self.weights = weight_bytes(model, self.batch)
        self.forward = compiled(model)
        self.decoders: dict[BenchKey, Decoder] = {}
        self.facts: dict[BenchKey, dict[str, Any]] = {}
        self.rows: dict[BenchKey, Row] = {}

    def measure(self) -> list[Row]:
        """One row per key, in order; a cache that fails has its reason and stops none of the others."""
        with room_for_graphs():
            for key in self.keys:
                try:
                    self.decoders[key], self.facts[key] = self._prepare(key)
                except Exception as error:
                    self._failed(key, error)
                self.tick(f"{key.variant} prepared")
            self._time()
            self.decoders.clear()
            free_memory()
        return [self.rows[key] for key in self.keys]

    def _prepare(self, key: BenchKey) -> tuple[Decoder, dict[str, Any]]:
        settings, is_compiled = self.settings, key.variant in COMPILED
        held = make_cache(key.variant, self.model, settings, key.budget, self.batch, key.context)
        fill(held.cache, self.shapes, self.batch, held.filled, self.model)
        decoder = Decoder(self.model, self.model.forward, held, self.batch)
        decoder.run(1)  # attention meets the cache, as it does in the forward of a prompt
        if is_compiled:
            decoder.forward = self.forward
            decoder.run(1)
        # Whole blocks for caches that evict, or are taken back once per block.
        few = _FEW if held.rewinds else settings.block
        decoder.run(few)
        return decoder, {
            **dict(zip(("cache_share", "eviction_share"), measure_shares(decoder, few, is_compiled), strict=True)),
            "kv_bytes": kv_bytes(held.cache),
            "growth_bytes": growth(lambda: decoder.run(few), self.model.device),
            "bytes_per_step": self.weights + state_bytes(held.cache),
        }

    def _time(self) -> None:
        def run(key: BenchKey, decoder: Decoder) -> float:
            compiled_before = graphs()
            seconds = decoder.run(self.settings.steps)
            self.facts[key]["recompiled"] = self.facts[key].get("recompiled", 0) + graphs() - compiled_before
            return seconds

        runs = {key: lambda key=key, decoder=decoder: run(key, decoder) for key, decoder in self.decoders.items()}
        times = interleaved(runs, self.settings.rounds, self._failed, lambda: self.tick("timed"))
        for key, seconds in times.items():
            self.rows[key] = self._row(key, [duration / self.settings.steps for duration in seconds])

    def _row(self, key: BenchKey, seconds: list[float]) -> Row:
        step, facts = median(seconds), self.facts[key]
        growth_bytes = facts["growth_bytes"]
        return make_row(
            key,
            MEASURED,
            step_ms=1000 * step,
            step_ms_lowest=1000 * min(seconds),
            step_ms_highest=1000 * max(seconds),
            rounds_ms=[1000 * duration for duration in seconds],
            tokens_per_second=self.batch / step,
            weight_bytes=self.weights,
            peak_bytes=None if growth_bytes is None else self.weights + facts["kv_bytes"] + growth_bytes,
            bandwidth=self.bandwidth,
            bandwidth_share=facts["bytes_per_step"] / self.bandwidth / step,
            **facts,
        )

    def _failed(self, key: BenchKey, error: Exception) -> None:
        why = reason(error)
        if is_out_of_memory(error):
            why = f"out of memory next to the other variants; try --variants {key.variant}"
        error.with_traceback(None)  # its frames hold the cache
        self.decoders.pop(key, None)
        free_memory()
        self.rows[key] = make_row(key, FAILED, why)

"""Decode steps of all variants, for one budget and batch size."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from ...models.device import is_out_of_memory
from ...running.efficiency import kv_bytes
from ...running.memory import free_memory
from ...store.results import Row
from ..rows import DECODE, FAILED, MEASURED, UNAVAILABLE, BenchKey, make_row, reason_of
from ..settings import BenchSettings
from ..timing import interleaved
from ..variants import COMPILED, FLOORS, Unavailable, make_cache
from .compiling import compiled, graphs, room_for_graphs
from .decoder import Decoder
from .filling import LayerShape, fill, layer_shapes
from .peak import growth
from .shares import measure_shares
from .traffic import share_of_limit, state_bytes, weight_bytes

#: Steps of the runs beside the timings, for caches that only grow.
_FEW = 2


class Lane(NamedTuple):
    """What is timed in turn with the others."""

    variant: str
    context: int | None


def lanes(settings: BenchSettings) -> list[Lane]:
    """Every variant at every context, the floors once."""
    return [
        Lane(name, context)
        for name in settings.variants
        for context in ((None,) if name in FLOORS else settings.contexts)
    ]


def decode_keys(settings: BenchSettings, budget: int, batch: int) -> list[BenchKey]:
    """The rows that a group yields."""
    return [BenchKey(DECODE, lane.variant, lane.context, budget, batch) for lane in lanes(settings)]


class Group:
    """All lanes of one budget and batch size, alive at the same time.

    Args:
        model: on its device.
        bandwidth: bytes per second.
        tick: told what was finished.
    """

    def __init__(
        self,
        model: Any,
        settings: BenchSettings,
        budget: int,
        batch: int,
        bandwidth: float,
        tick: Callable[[str], None],
    ) -> None:
        self.model, self.settings, self.bandwidth, self.tick = model, settings, bandwidth, tick
        self.budget, self.batch = budget, batch
        self.shapes: dict[int, LayerShape] = layer_shapes(model)
        self.weights = weight_bytes(model, batch)
        self.forward = compiled(model)
        self.decoders: dict[Lane, Decoder] = {}
        self.facts: dict[Lane, dict[str, Any]] = {}
        self.rows: dict[Lane, Row] = {}

    def measure(self) -> list[Row]:
        """One row per lane, in order; a lane that fails has its reason and stops none of the others."""
        with room_for_graphs():
            self.prepare()
            self._time()
            self.forget()
        return [self.rows[lane] for lane in lanes(self.settings)]

    def prepare(self) -> None:
        """Make, fill and warm up every lane, and measure what needs no timing."""
        for lane in lanes(self.settings):
            try:
                self.decoders[lane], self.facts[lane] = self._prepare(lane)
            except Unavailable as error:
                self._give_up(lane, UNAVAILABLE, str(error))
            except Exception as error:
                self._failed(lane, error)
            self.tick(f"{lane.variant} prepared")

    def forget(self) -> None:
        """Give all memory back."""
        self.decoders.clear()
        free_memory()

    def _prepare(self, lane: Lane) -> tuple[Decoder, dict[str, Any]]:
        settings, is_compiled = self.settings, lane.variant in COMPILED
        held = make_cache(lane.variant, self.model, settings, self.budget, self.batch, lane.context)
        fill(held.cache, self.shapes, self.batch, held.filled, self.model)
        forward = self.forward if is_compiled else self.model.forward
        decoder = Decoder(self.model, forward, held, self.batch)
        before = graphs()
        first = decoder.run(1)
        # Whole blocks for caches that evict, or are taken back once per block.
        few = _FEW if held.rewinds else settings.block_size
        decoder.run(few)
        shares = measure_shares(decoder, few, is_compiled)
        return decoder, {
            "first_step_seconds": first,
            "graphs": graphs() - before if is_compiled else None,
            "cache_share": shares.cache,
            "eviction_share": shares.eviction,
            "kv_bytes": kv_bytes(held.cache),
            "growth_bytes": growth(lambda: decoder.run(few), self.model.device),
            "bytes_per_step": self.weights + state_bytes(held.cache),
        }

    def _time(self) -> None:
        def run(lane: Lane, decoder: Decoder) -> float:
            compiled_before = graphs()
            seconds = decoder.run(self.settings.steps)
            self.facts[lane]["recompiled"] = self.facts[lane].get("recompiled", 0) + graphs() - compiled_before
            return seconds

        runs = {lane: lambda lane=lane, decoder=decoder: run(lane, decoder) for lane, decoder in self.decoders.items()}
        times = interleaved(runs, self.settings.rounds, self._failed, lambda: self.tick("timed"))
        for lane, seconds in times.items():
            self.rows[lane] = self._row(lane, [duration / self.settings.steps for duration in seconds])

    def _row(self, lane: Lane, seconds: list[float]) -> Row:
        step, facts = median(seconds), self.facts[lane]
        growth_bytes = facts["growth_bytes"]
        return make_row(
            BenchKey(DECODE, lane.variant, lane.context, self.budget, self.batch),
            MEASURED,
            step_ms=1000 * step,
            step_ms_lowest=1000 * min(seconds),
            step_ms_highest=1000 * max(seconds),
            rounds_ms=[1000 * duration for duration in seconds],
            tokens_per_second=self.batch / step,
            weight_bytes=self.weights,
            peak_bytes=None if growth_bytes is None else self.weights + facts["kv_bytes"] + growth_bytes,
            bandwidth=self.bandwidth,
            bandwidth_share=share_of_limit(facts["bytes_per_step"], self.bandwidth, step),
            **facts,
        )

    def _failed(self, lane: Lane, error: Exception) -> None:
        reason = reason_of(error)
        if is_out_of_memory(error):
            reason = f"out of memory next to the other variants; try --variants {lane.variant}"
        error.with_traceback(None)  # its frames hold the cache
        self._give_up(lane, FAILED, reason)

    def _give_up(self, lane: Lane, status: str, reason: str) -> None:
        self.decoders.pop(lane, None)
        free_memory()
        key = BenchKey(DECODE, lane.variant, lane.context, self.budget, self.batch)
        self.rows[lane] = make_row(key, status, reason)

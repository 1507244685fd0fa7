"""`paged-eviction bench --preset bits`: time and memory of a decoded token at each precision.

A cache of C tokens as they came beside caches of as many tokens in 8, 4, 3 and 2 bits, of as many as fit into the same
bytes, and of 4 C tokens in 4 bits. One row; keys and values are random, since time does not depend on them. Attention
reads codes as they lie; eager steps are measured with tokens that are decoded first, too, as every other attention
implementation has them. Memory is that of the cache, and the most that a step takes on top.

Time is that of the processor where one thread computes, so that what else runs on the machine is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION

from ...caches.making import empty_cache
from ...options.bench import BenchOptions
from ...running.terminal import say
from ...store.results import SUMMARY
from ...store.summaries.formats import to_terminal
from ...store.summaries.table import Table, simple_table
from ..shapes import choose_device, make_model
from ..summary import a_shape, measure_once, one_budget, refuse_others
from ..timing import interleaved, ratio
from ..variants import Held
from .compiling import compiled, room_for_graphs
from .decoder import Decoder
from .filling import fill, layer_shapes
from .peak import growth

PRESET = "bits"
BITS = (8, 4, 3, 2)
WAYS = ("eager", "compiled")
#: Options that replace parts of the preset.
_TAKEN = {"model", "dtype", "device", "steps", "rounds"}


@dataclass(frozen=True)
class PrecisionSettings:
    """What is measured.

    Attributes:
        budget: tokens of the cache that the others are compared with.
        steps: decoded tokens per timing.
        rounds: timings.
        ways: to run a step.
        bits: that are compared with none.
        more: whether as many tokens as the bytes hold, and four times as many, are measured, too.
    """

    budget: int = 1024
    steps: int = 16
    rounds: int = 9
    ways: tuple[str, ...] = WAYS
    bits: tuple[int, ...] = BITS
    more: bool = True


def run(options: BenchOptions, output: Path) -> bool:
    """Measure, show and write; True, since all of it was measured or an error was raised.

    Raises:
        UserError: an option that the preset does not take, or results that are there already.
    """
    refuse_others(options, _TAKEN, PRESET, "which measures all precisions")
    budget, model = one_budget(options, PRESET), a_shape(options, PRESET)
    typed = {name: getattr(options, name) for name in ("steps", "rounds") if name in options.model_fields_set}
    settings, notes = PrecisionSettings(budget=budget, **typed), Console(stderr=True)
    device = choose_device(options.device, model)
    found = measure_once(
        *(options, output, device),
        lambda: measure_all(make_model(options.but(device=device)), settings, partial(say, notes)),
    )
    for way, rows in found.items():
        Console().print(to_terminal(_table(way, rows)))
    say(notes, f"written to {output / SUMMARY}")
    return True


def measure_all(model: Any, settings: PrecisionSettings, tell: Callable[[str], Any]) -> dict[str, Any]:
    """Eager and compiled steps: milliseconds and bytes by name."""
    found: dict[str, Any] = {}
    for way in settings.ways:
        with room_for_graphs():
            found[way] = measure(model, compiled(model) if way == "compiled" else model.forward, settings, way, tell)
    return found


def measure(
    model: Any, forward: Any, settings: PrecisionSettings, way: str, tell: Callable[[str], Any]
) -> dict[str, Any]:
    """Of one way to run a step, by name."""
    decoders = {}
    for bits, tokens in sizes(model, settings):
        name = f"{bits or 'no'} bits, {tokens} tokens"
        decoders[name] = _decoder(model, forward, bits, tokens, way == "compiled")
        if bits and way == "eager":
            decoders[f"{name}, decoded first"] = _decoder(model, forward, bits, tokens, False, "sdpa")
    base = next(iter(decoders))
    for name, decoder in decoders.items():
        tell(f"{way}, {name}: getting ready")
        decoder.run(settings.steps)
    runs = {name: partial(_seconds, decoder, settings.steps) for name, decoder in decoders.items()}
    times = interleaved(runs, settings.rounds)
    found = {}
    for name, decoder in decoders.items():
        found[name] = {
            "step_ms": round(1e3 * median(times[name]) / settings.steps, 3),
            f"times {base}": round(ratio(times[name], times[base]), 2),
            "cache_bytes": decoder.held.cache.stats().storage_bytes,
            "step_bytes": growth(partial(decoder.run, 1), model.device),
        }
        tell(f"{way}, {name}: {found[name]['step_ms']} ms")
    return found


def _seconds(decoder: Decoder, steps: int) -> float:
    """Of so many steps: of this process, where one thread does all of it, or of the clock."""
    before = time.process_time()
    passed = decoder.run(steps)
    alone = decoder.model.device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() - before if alone else passed


def sizes(model: Any, settings: PrecisionSettings) -> list[tuple[int | None, int]]:
    """Bits and tokens: as many tokens as the budget, as many as its bytes hold, and in 4 bits four times as many."""
    budget = settings.budget
    same_tokens: list[tuple[int | None, int]] = [(bits, budget) for bits in (None, *settings.bits)]
    if not settings.more:
        return same_tokens
    most = _storage_bytes(model, budget, None)
    same_bytes: list[tuple[int | None, int]] = []
    for bits in settings.bits:
        tokens = budget
        while _storage_bytes(model, tokens + 16, bits) <= most:
            tokens += 16
        same_bytes.append((bits, tokens))
    more = [(4, 4 * budget)] if 4 in settings.bits else []
    return [*same_tokens, *more, *same_bytes]


def _storage_bytes(model: Any, tokens: int, bits: int | None) -> int:
    """As the cache counts them, for one row."""
    return int(empty_cache(model.config, model.dtype, budget=tokens, bits=bits).stats().storage_bytes)


def _decoder(
    model: Any, forward: Any, bits: int | None, tokens: int, static: bool, attention: str = PAGED_EVICTION
) -> Decoder:
    """A full cache, and what decodes with it; `attention` reads codes where they lie, or not."""

    @contextmanager
    def around() -> Iterator[None]:
        model.set_attn_implementation(attention)
        yield

    mask = torch.ones(1, 2 * tokens + 1, dtype=torch.long, device=model.device)
    model.set_attn_implementation("sdpa")  # what fills the cache is not attended to
    cache = PagedEvictionCache(model.config, budget=tokens, bits=bits, static=static, attention_mask=mask)
    fill(cache, layer_shapes(model), 1, 2 * tokens, model)
    decoder = Decoder(model, model.forward, Held(cache, 2 * tokens, 2 * tokens, False, around), 1)
    decoder.run(1)  # shows the cache that attention gets its keys as they are given
    decoder.forward = forward
    return decoder


def _table(way: str, rows: dict[str, dict[str, Any]]) -> Table:
    lines = []
    for name, row in rows.items():
        times = next(value for key, value in row.items() if key.startswith("times "))
        mega = (f"{row[key] / 1e6:.2f}" for key in ("cache_bytes", "step_bytes"))
        lines.append((name, f"{row['step_ms']:g}", f"{times:g}", *mega))
    return simple_table("", (way, "step, ms", "times", "cache, MB", "step, MB"), lines)

"""`update` of one layer for one decoded token: this cache's beside DynamicCache's, which copies all that it holds."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from hf_paged_eviction import PagedEvictionCache

from ..running.efficiency import Stopwatch
from ..store.results import Row
from .rows import MEASURED, UPDATE, BenchKey, make_row
from .settings import BenchSettings
from .timing import interleaved
from .variants import FULL, PAGED

#: As in Llama-3.1-8B.
HEADS, WIDTH = 8, 128
BUDGET, CONTEXT = 2048, 4096
#: Updates in a row: enough that the processor's caches, full of the other's data at first, matter little.
STEPS = 64

#: The rows that the measurement yields.
UPDATE_KEYS = {PAGED: BenchKey(UPDATE, PAGED, CONTEXT, BUDGET, 1), FULL: BenchKey(UPDATE, FULL, CONTEXT, BUDGET, 1)}


def measure_update(settings: BenchSettings, tick: Callable[[str], None]) -> list[Row]:
    """Interleaved, over whole blocks, the choice of victims included; float32, one row."""
    config = LlamaConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, num_hidden_layers=1
    )
    paged = PagedEvictionCache(
        config, budget=BUDGET, policy=settings.policy, attention_mask=torch.ones(1, CONTEXT, dtype=torch.long)
    )
    runs = {PAGED: _updates(paged, settings), FULL: _updates(DynamicCache(config=config), settings)}
    for run in runs.values():
        run()
    times = interleaved(runs, settings.rounds, tick=lambda: tick("update"))
    return [
        make_row(
            UPDATE_KEYS[name],
            MEASURED,
            update_us=1e6 * median(seconds) / STEPS,
            rounds_us=[1e6 * each / STEPS for each in seconds],
        )
        for name, seconds in times.items()
    ]


def _updates(cache: Any, settings: BenchSettings) -> Callable[[], float]:
    device = torch.device(settings.device)
    states = torch.randn(2, 1, HEADS, CONTEXT, WIDTH, device=device)
    cache.update(states[0], states[1], 0)
    token = torch.randn(1, HEADS, 1, WIDTH, device=device)

    def run() -> float:
        if type(cache) is DynamicCache and (grown := cache.get_seq_length() - CONTEXT):
            cache.crop(-grown)
        watch = Stopwatch(device)
        for _ in range(STEPS):
            cache.update(token, token, 0)
        return watch.lap()

    return run

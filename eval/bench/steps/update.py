"""`update` of one layer for one decoded token: this cache's beside DynamicCache's, which copies all that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from hf_paged_eviction import PagedEvictionCache

from ...running.efficiency import Stopwatch
from ...store.results import Row
from ..rows import MEASURED, UPDATE, BenchKey, make_row
from ..settings import BenchSettings
from ..timing import interleaved
from ..variants import FULL, PAGED

#: As in Llama-3.1-8B.
HEADS, WIDTH = 8, 128
BUDGET, CONTEXT = 2048, 4096
#: Updates in a row: enough that the processor's caches, full of the other's data at first, matter little.
STEPS = 64

#: The rows that the measurement yields.
UPDATE_KEYS = {PAGED: BenchKey(UPDATE, PAGED, CONTEXT, BUDGET, 1), FULL: BenchKey(UPDATE, FULL, CONTEXT, BUDGET, 1)}


def measure_update(settings: BenchSettings, tick: Callable[[str], None]) -> list[Row]:
    """Rows of this cache and of DynamicCache."""
    device = torch.device(settings.device)
    times = time_updates([settings.policy], device, settings.rounds, lambda: tick("update"))
    return [
        make_row(
            UPDATE_KEYS[PAGED if name == settings.policy else name],
            MEASURED,
            update_us=1e6 * median(seconds),
            rounds_us=[1e6 * each for each in seconds],
        )
        for name, seconds in times.items()
    ]


def time_updates(
    policies: Sequence[str], device: torch.device, rounds: int, tick: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds per token and round under each policy and, as `FULL`, in a DynamicCache.

    Interleaved, over whole blocks, the choice of victims included; float32, one row.
    """
    config = LlamaConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, num_hidden_layers=1
    )
    mask = torch.ones(1, CONTEXT, dtype=torch.long)
    caches: dict[str, Any] = {
        policy: PagedEvictionCache(config, budget=BUDGET, policy=policy, attention_mask=mask) for policy in policies
    }
    runs = {name: _updates(cache, device) for name, cache in {**caches, FULL: DynamicCache(config=config)}.items()}
    for run in runs.values():
        run()
    return interleaved(runs, rounds, tick=tick)


def _updates(cache: Any, device: torch.device) -> Callable[[], float]:
    states = torch.randn(2, 1, HEADS, CONTEXT, WIDTH, device=device)
    cache.update(states[0], states[1], 0)
    token = torch.randn(1, HEADS, 1, WIDTH, device=device)

    def run() -> float:
        if type(cache) is DynamicCache and (grown := cache.get_seq_length() - CONTEXT):
            cache.crop(-grown)
        watch = Stopwatch(device)
        for _ in range(STEPS):
            cache.update(token, token, 0)
        return watch.lap() / STEPS

    return run

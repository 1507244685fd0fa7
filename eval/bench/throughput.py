"""Whole answers: prompts read and answered through `generate`, tokens per second of all of it (arXiv 2509.04377)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from hf_paged_eviction.internals import CACHE_ARGUMENT

from ..models.device import is_out_of_memory
from ..running.efficiency import Stopwatch
from ..running.memory import free_memory
from ..store.results import Row
from .decoder import room_for_graphs
from .methods import ANSWERING, FULL, FULL_COMPILED, PAGED_STATIC_OWN, STATIC
from .rows import THROUGHPUT, BenchKey, attempt
from .settings import BenchSettings, as_published
from .variants import own_attention, paged_cache

#: Tokens of the answer before the clock runs: kernels are chosen, graphs are made.
_WARM_UP = 20


def throughput_keys(settings: BenchSettings) -> list[BenchKey]:
    """The rows that the test yields."""
    return [
        BenchKey(THROUGHPUT, name, settings.input_tokens, budget, settings.batch_size)
        for name in settings.variants
        if name in ANSWERING
        for budget in ((None,) if name in (FULL, FULL_COMPILED) else settings.budgets)
    ]


def measure_throughput(model: Any, settings: BenchSettings, key: BenchKey, tick: Callable[[str], None]) -> Row:
    """One variant answers all requests, round after round; `tick` is told what runs."""

    def measure() -> dict[str, Any]:
        with own_attention(model) if key.variant == PAGED_STATIC_OWN else nullcontext(), room_for_graphs():
            size, seconds = _as_many_as_fit(model, as_published(settings, key.variant), key, tick)
        latency = median(seconds) / -(-settings.requests // size)
        return {
            **{name: getattr(settings, name) for name in ("requests", "input_tokens", "output_tokens")},
            "rows_together": size,
            "rounds_seconds": seconds,
            "tokens_per_second": median(settings.requests * settings.output_tokens / one for one in seconds),
            "latency_seconds": latency,
            "token_ms": 1000 * latency / settings.output_tokens,
            # `generate` compiles by itself, for a cache of static shapes, on accelerators.
            "compiled": key.variant in (FULL_COMPILED, *STATIC) and model.device.type != "cpu",
        }

    return attempt(key, measure)


def _as_many_as_fit(
    model: Any, settings: BenchSettings, key: BenchKey, tick: Callable[[str], None]
) -> tuple[int, list[float]]:
    """Rows together, half as many where memory runs out, and the seconds of all rounds."""
    size = min(settings.batch_size or settings.requests, settings.requests)
    while True:
        try:
            return size, _rounds(model, settings, key, size, tick)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or size == 1 or settings.batch_size is not None:
                raise
        size //= 2
        free_memory()


def _rounds(model: Any, settings: BenchSettings, key: BenchKey, size: int, tick: Callable[[str], None]) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    size_of_vocabulary = model.config.get_text_config().vocab_size
    prompts = torch.randint(0, size_of_vocabulary, (settings.requests, settings.input_tokens), generator=generator)
    batches = prompts.to(model.device).split(size)
    caches: dict[int, Any] = {}
    _answer(model, _cache(model, settings, key, size, caches), batches[0], min(_WARM_UP, settings.output_tokens))
    seconds = []
    for number in range(settings.rounds_of_answers(1)):
        tick(f"{key.variant}{'' if key.budget is None else f' at {key.budget}'} answers, round {number + 1}")
        watch = Stopwatch(model.device)
        for batch in batches:
            _answer(model, _cache(model, settings, key, len(batch), caches), batch, settings.output_tokens)
        seconds.append(watch.lap())
    return seconds


@torch.no_grad()
def _answer(model: Any, cache: Any, prompts: torch.Tensor, count: int) -> None:
    """`count` tokens, no fewer: a random model may say the end-of-text token at any time."""
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        **{CACHE_ARGUMENT: cache},
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        stop_strings=None,
    )


def _cache(model: Any, settings: BenchSettings, key: BenchKey, rows: int, kept: dict[int, Any]) -> Any:
    """An empty cache; those of static shape are kept, emptied and used again, as their graphs belong to them."""
    if key.variant == FULL:
        return DynamicCache(config=model.config)
    if rows in kept:
        kept[rows].reset()
    elif key.budget is None:
        length = settings.input_tokens + settings.output_tokens
        kept[rows] = StaticCache(config=model.config, max_cache_len=length)
    else:
        kept[rows] = paged_cache(model, settings, key.budget, key.variant in STATIC, rows, settings.input_tokens)
    return kept[rows]

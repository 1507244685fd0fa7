"""Whole answers: prompts read and answered through `generate`, tokens per second of all of it (arXiv 2509.04377)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from hf_paged_eviction.internals import CACHE_ARGUMENT

from ..errors import UserError
from ..models.device import is_out_of_memory
from ..running.efficiency import Stopwatch
from ..running.memory import free_memory
from ..store.results import Row
from .methods import METHODS
from .rows import FAILED, MEASURED, THROUGHPUT, UNAVAILABLE, BenchKey, make_row, reason_of
from .settings import BenchSettings, Throughput, as_published
from .steps.compiling import room_for_graphs
from .variants import (
    FULL,
    FULL_COMPILED,
    PAGED,
    PAGED_STATIC_OWN,
    STATIC,
    Unavailable,
    own_attention,
    paged_cache,
)

VARIANTS_OF_THROUGHPUT = (FULL, FULL_COMPILED, PAGED, *STATIC, *METHODS)
#: Tokens of the answer before the clock runs: kernels are chosen, graphs are made.
_WARM_UP = 20


def throughput_keys(settings: BenchSettings) -> list[BenchKey]:
    """The rows that the test yields."""
    throughput = settings.throughput
    return [
        BenchKey(THROUGHPUT, name, throughput.input_tokens, budget, throughput.batch_size)
        for name in (settings.variants if throughput else ())
        if throughput and name in VARIANTS_OF_THROUGHPUT
        for budget in ((None,) if name in (FULL, FULL_COMPILED) else throughput.budgets)
    ]


def measure_throughput(model: Any, settings: BenchSettings, key: BenchKey, tick: Callable[[str], None]) -> Row:
    """One variant answers all requests, `rounds` times; `tick` is told what runs.

    Where memory runs out, half as many rows run together.
    """
    throughput, settings = _asked(settings), as_published(settings, key.variant)
    try:
        around = own_attention(model) if key.variant == PAGED_STATIC_OWN else nullcontext
        with around(), room_for_graphs():
            size = min(throughput.batch_size or throughput.requests, throughput.requests)
            while True:
                try:
                    seconds = _rounds(model, settings, key, size, tick)
                    break
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error) or size == 1 or throughput.batch_size is not None:
                        raise
                size //= 2
                free_memory()
    except Unavailable as error:
        return make_row(key, UNAVAILABLE, str(error))
    except Exception as error:
        return make_row(key, FAILED, reason_of(error))
    finally:
        free_memory()
    tokens = throughput.requests * throughput.output_tokens
    rates = [tokens / duration for duration in seconds]
    batches = -(-throughput.requests // size)
    return make_row(
        key,
        MEASURED,
        requests=throughput.requests,
        input_tokens=throughput.input_tokens,
        output_tokens=throughput.output_tokens,
        rows_together=size,
        rounds_seconds=seconds,
        tokens_per_second=median(rates),
        latency_seconds=median(seconds) / batches,
        token_ms=1000 * median(seconds) / batches / throughput.output_tokens,
        compiled=_compiles(model, key.variant),
    )


def _asked(settings: BenchSettings) -> Throughput:
    if settings.throughput is None:
        raise UserError("no throughput to measure: add --preset paper")
    return settings.throughput


def _compiles(model: Any, name: str) -> bool:
    """Whether `generate` compiles by itself: for a cache of static shapes, on accelerators."""
    return name in (FULL_COMPILED, *STATIC) and model.device.type != "cpu"


def _rounds(model: Any, settings: BenchSettings, key: BenchKey, size: int, tick: Callable[[str], None]) -> list[float]:
    throughput = _asked(settings)
    generator = torch.Generator().manual_seed(0)
    size_of_vocabulary = model.config.get_text_config().vocab_size
    prompts = torch.randint(0, size_of_vocabulary, (throughput.requests, throughput.input_tokens), generator=generator)
    batches = prompts.to(model.device).split(size)
    caches = _Caches(model, settings, key)
    _answer(model, caches, batches[0], min(_WARM_UP, throughput.output_tokens))
    seconds = []
    for number in range(throughput.rounds):
        tick(f"{key.variant}{'' if key.budget is None else f' at {key.budget}'} answers, round {number + 1}")
        watch = Stopwatch(model.device)
        for batch in batches:
            _answer(model, caches, batch, throughput.output_tokens)
        seconds.append(watch.lap())
    return seconds


@torch.no_grad()
def _answer(model: Any, caches: _Caches, prompts: torch.Tensor, count: int) -> None:
    """`count` tokens, no fewer: a random model may say the end-of-text token at any time."""
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        **{CACHE_ARGUMENT: caches.next(len(prompts))},
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )


class _Caches:
    """Empty caches; those of static shape are emptied and used again, as their graphs belong to them."""

    def __init__(self, model: Any, settings: BenchSettings, key: BenchKey) -> None:
        self.model, self.settings, self.name, self.budget = model, settings, key.variant, key.budget
        self.kept: dict[int, Any] = {}

    def next(self, rows: int) -> Any:
        if self.name == FULL:
            return DynamicCache(config=self.model.config)
        cache = self.kept.get(rows)
        if cache is None:
            self.kept[rows] = cache = self._make(rows)
        else:
            cache.reset()
        return cache

    def _make(self, rows: int) -> Any:
        throughput = _asked(self.settings)
        if self.budget is None:
            return StaticCache(
                config=self.model.config, max_cache_len=throughput.input_tokens + throughput.output_tokens
            )
        static = self.name in STATIC
        return paged_cache(self.model, self.settings, self.budget, static, rows, throughput.input_tokens)

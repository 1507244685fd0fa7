"""One trace of requests, answered by transformers' own continuous batching and by the same with budgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from statistics import mean, median, quantiles
from typing import Any

from hf_paged_eviction.serving import paged_batching

from .trace import Arrival, ServingSettings, make_model, trace


@dataclass
class Watched:
    """What was seen of one run.

    Attributes:
        live: requests that own pages, at each step.
        pressed: the same at the steps at which others waited for pages.
        preempted: requests whose pages were taken away.
        first: seconds from arrival to the first token, by request.
        tokens: new tokens.
    """

    live: list[int] = field(default_factory=list)
    pressed: list[int] = field(default_factory=list)
    preempted: int = 0
    first: list[float] = field(default_factory=list)
    tokens: int = 0


def run_serving(settings: ServingSettings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Answer the trace without eviction and with each budget.

    Returns:
        `settings`, and a row of numbers by variant: `full`, `budget 256`, ...
    """
    runs: dict[str, dict[str, Any]] = {}
    arrivals, served = trace(settings), make_model(settings)
    for budget in (None, *settings.budgets):
        name = "full" if budget is None else f"budget {budget}"
        runs[name] = _row(served, settings, arrivals, budget)
        say(f"{name}: {runs[name]}")
    return {"settings": asdict(settings), "runs": runs}


def _row(served: Any, settings: ServingSettings, arrivals: Sequence[Arrival], budget: int | None) -> dict[str, Any]:
    bound = (
        nullcontext()
        if budget is None
        else paged_batching(
            served, budget, policy=settings.policy, block_size=settings.block_size, prefill_chunk_size=settings.chunk
        )
    )
    with bound:
        manager, watched = make_manager(served, settings), Watched()
        _watch(manager.batch_processor, watched)
        wall, processor_time = time.perf_counter(), time.process_time()
        _answer(manager, arrivals, watched)
        wall, processor_time = time.perf_counter() - wall, time.process_time() - processor_time
        manager.stop()
    return {
        "seconds": round(wall, 2),
        "cpu_seconds": round(processor_time, 2),
        "requests_per_second": round(len(arrivals) / wall, 3),
        "tokens_per_second": round(watched.tokens / wall, 2),
        "tokens_per_cpu_second": round(watched.tokens / processor_time, 2),
        "live_mean": round(mean(watched.live), 2),
        "live_mean_while_others_wait": round(mean(watched.pressed), 2) if watched.pressed else None,
        "live_most": max(watched.live),
        "preempted": watched.preempted,
        "first_token_median": round(median(watched.first), 3),
        "first_token_95": round(quantiles(watched.first, n=20)[-1], 3),
        "steps": len(watched.live),
    }


def make_manager(served: Any, settings: ServingSettings) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pool = ContinuousBatchingConfig(
        page_size=settings.page_size,
        num_blocks=settings.pages,
        max_batch_tokens=settings.batch_tokens,
        max_requests_per_batch=settings.batch_tokens,
        allow_block_sharing=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16)
    manager = served.init_continuous_batching(greedy, pool)
    manager.warmup()
    return manager


def _watch(processor: Any, watched: Watched) -> None:
    step, offload = processor._generation_step, processor.offloading_manager.offload_requests
    (allocator,) = processor.cache.cache_allocators.values()

    def watched_step(*args: Any) -> None:
        watched.live.append(len(allocator.block_table))
        if processor.scheduler.waiting_requests:
            watched.pressed.append(watched.live[-1])
        step(*args)

    def watched_offload() -> bool:
        before = len(processor.scheduler.active_requests)
        done: bool = offload()
        watched.preempted += before - len(processor.scheduler.active_requests)
        return done

    processor._generation_step = watched_step
    processor.offloading_manager.offload_requests = watched_offload


def _answer(manager: Any, arrivals: Sequence[Arrival], watched: Watched) -> None:
    manager.start()
    begun, rest, left = time.perf_counter(), list(arrivals), len(arrivals)
    came: dict[str, float] = {}
    while left:
        while rest and rest[0].at <= time.perf_counter() - begun:
            arrival = rest.pop(0)
            name = manager.add_request(arrival.prompt, max_new_tokens=arrival.answer, streaming=True, eos_token_id=-1)
            came[name] = time.perf_counter()
        result = manager.get_result(timeout=0.01)
        if result is None:
            if not manager.is_running():
                raise RuntimeError(
                    "The generation thread ended early."
                ) from manager.background_thread_status.fatal_error
            continue
        if result.generated_tokens and result.request_id in came:
            watched.first.append(time.perf_counter() - came.pop(result.request_id))
        if result.is_finished():
            left -= 1
            watched.tokens += len(result.generated_tokens)

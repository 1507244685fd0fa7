"""Continuous batching with a fixed pool of pages: how many requests are live, how fast they are answered.

`run_serving` answers one trace of requests by transformers' own continuous batching and by the same with budgets.
`run_bookkeeping` says what the choice of victims costs per step. Both are preset `serving` of `paged-eviction bench`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from statistics import mean, median, quantiles
from typing import Any

import torch

from hf_paged_eviction.serving import paged_batching

#: Small enough for a CPU: what is compared is scheduling, and attention to a pool that is equally full.
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class ServingSettings:
    """A pool, a trace, and what is compared.

    Attributes:
        budgets: tokens per request and layer.
        policy, block_size: what evicts, and how many tokens together.
        requests: in the trace.
        per_second: requests that arrive, on average.
        prompts, answers: shortest and longest, in tokens; drawn evenly on a logarithmic scale.
        pages, page_size: of the pool.
        batch_tokens: most tokens of a step.
        chunk: prompts are cut every so many tokens where there is a budget.
        seed: of the trace and of the weights.
    """

    budgets: tuple[int, ...] = (256, 128)
    policy: str = "keydiff"
    block_size: int = 16
    requests: int = 48
    per_second: float = 8.0
    prompts: tuple[int, int] = (256, 1536)
    answers: tuple[int, int] = (128, 512)
    pages: int = 64
    page_size: int = 64
    batch_tokens: int = 320
    chunk: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Arrival:
    """A request of the trace: when it comes (seconds), what it says, how many tokens it wants."""

    at: float
    prompt: list[int]
    answer: int


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


def trace(settings: ServingSettings) -> list[Arrival]:
    """Requests that arrive at random, long ones and short ones mixed."""
    draw, at, found = random.Random(settings.seed), 0.0, []
    for _ in range(settings.requests):
        at += draw.expovariate(settings.per_second)
        prompt = [draw.randrange(SHAPE["vocab_size"]) for _ in range(_between(draw, settings.prompts))]
        found.append(Arrival(at, prompt, _between(draw, settings.answers)))
    return found


def _between(draw: random.Random, ends: tuple[int, int]) -> int:
    low, high = ends
    power: float = (high / low) ** draw.random()
    return round(low * power)


def model(seed: int) -> Any:
    """A model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def run_serving(settings: ServingSettings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Answer the trace without eviction and with each budget.

    Returns:
        `settings`, and a row of numbers by variant: `full`, `budget 256`, ...
    """
    runs: dict[str, dict[str, Any]] = {}
    arrivals, served = trace(settings), model(settings.seed)
    for budget in (None, *settings.budgets):
        name = "full" if budget is None else f"budget {budget}"
        runs[name] = _row(served, settings, arrivals, budget)
        say(f"{name}: {runs[name]}")
    return {"settings": asdict(settings), "model": SHAPE, "runs": runs}


def _row(served: Any, settings: ServingSettings, arrivals: Sequence[Arrival], budget: int | None) -> dict[str, Any]:
    bound = (
        nullcontext()
        if budget is None
        else paged_batching(served, budget, settings.policy, settings.block_size, prefill_chunk_size=settings.chunk)
    )
    with bound:
        manager, watched = _manager(served, settings), Watched()
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


def _manager(served: Any, settings: ServingSettings) -> Any:
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
            continue
        if result.generated_tokens and result.request_id in came:
            watched.first.append(time.perf_counter() - came.pop(result.request_id))
        if result.is_finished():
            left -= 1
            watched.tokens += len(result.generated_tokens)


# ---- what the choice of victims costs --------------------------------------------------------------------------------


def run_bookkeeping(
    settings: ServingSettings, live: Sequence[int] = (1, 4, 16, 64), new: int = 64, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Time of the bookkeeping as a share of a step, where every request answers and all its slots are in use.

    Args:
        live: requests at once.
        new: tokens that each answers; their first eight steps are left out.
    """
    served, budget, found = model(settings.seed), settings.budgets[0], {}
    for count in live:
        with _bookkeeping(served, settings, budget, count) as (manager, steps, choices):
            draw = random.Random(count)
            for _ in range(count):
                # Phases differ, as those of requests do that arrive at different times.
                length = budget + draw.randrange(1, 64)
                prompt = [draw.randrange(SHAPE["vocab_size"]) for _ in range(length)]
                manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
            while manager.batch_processor.has_pending_requests() or not manager.input_queue.empty():
                manager._generation_loop_body(manager.batch_processor, bootstrapping=False)
        found[str(count)] = _shares(steps[-new + 8 :], choices[-new + 8 :])
        say(f"{count} requests: {found[str(count)]}")
    return {"budget": budget, "policy": settings.policy, "by_live_requests": found}


@contextmanager
def _bookkeeping(
    served: Any, settings: ServingSettings, budget: int, count: int
) -> Iterator[tuple[Any, list[float], list[float]]]:
    pages = count * -(-budget // settings.page_size)
    wanted = replace(settings, pages=pages, batch_tokens=settings.chunk + count)
    steps: list[float] = []
    choices: list[float] = []
    with paged_batching(served, budget, settings.policy, settings.block_size, prefill_chunk_size=settings.chunk):
        manager = _manager(served, wanted)
        manager.current_batch = 0
        bounded = manager.batch_processor.cache.bounded
        new_step = bounded._new_step

        def timed_step() -> Any:
            step = new_step()
            step.begin = _timed(step.begin, choices)
            return step

        bounded._new_step, bounded._step = timed_step, timed_step()
        manager._generation_loop_body = _timed(manager._generation_loop_body, steps)
        yield manager, steps, choices


def _timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - start)

    return timed


def _shares(steps: Sequence[float], choices: Sequence[float]) -> dict[str, float]:
    return {
        "step_ms": round(1e3 * mean(steps), 3),
        "bookkeeping_ms": round(1e3 * mean(choices), 3),
        "share": round(sum(choices) / sum(steps), 4),
    }


__all__ = ["ServingSettings", "run_bookkeeping", "run_serving"]

"""What the choice of victims costs per step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean
from typing import Any

from hf_paged_eviction.serving import paged_batching

from .answering import make_manager
from .trace import ServingSettings, make_model


def run_bookkeeping(
    settings: ServingSettings, live: Sequence[int] = (1, 4, 16, 64), new: int = 64, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Time of the bookkeeping as a share of a step, where every request answers and all its slots are in use.

    Args:
        live: requests at once.
        new: tokens that each answers; their first eight steps are left out.
    """
    served, budget, found = make_model(settings), settings.budgets[0], {}
    for count in live:
        with _bookkeeping(served, settings, budget, count) as (manager, steps, choices):
            draw = random.Random(count)
            for _ in range(count):
                # Phases differ, as those of requests do that arrive at different times.
                length = budget + draw.randrange(1, 64)
                prompt = [draw.randrange(settings.shape["vocab_size"]) for _ in range(length)]
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
    with paged_batching(
        served, budget, policy=settings.policy, block_size=settings.block_size, prefill_chunk_size=settings.chunk
    ):
        manager = make_manager(served, wanted)
        manager.current_batch = 0
        bounded = manager.batch_processor.scheduler.bounded
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

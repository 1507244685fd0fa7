"""The time to the first token over the length of the prompt.

The full cache reads a prompt in one forward, or in the same chunks as this cache; a chunk then attends to all that was
read, so that time grows with the square of the length. A bounded cache attends to its budget and the chunk: time grows
with the length. Ids are random and so are the weights of a shape: time does not depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.internals import feed

from ..running.efficiency import Stopwatch
from ..store.results import Row
from .methods import FULL
from .rows import PREFILL, BenchKey, attempt
from .settings import BenchSettings
from .variants import own_attention

#: Up to this length chunk sizes and policies are compared; beyond, what grows with the square and one line of what does
#: not.
COMPARED = 16384
#: Longer prompts are read once, unless more rounds are asked for.
_LONG, _ROUNDS = 8192, 3


@dataclass(frozen=True)
class Case:
    """One way to read a prompt.

    Attributes:
        cache: `FULL`, or the name of a policy.
        chunk: tokens per forward; None = one forward.
    """

    length: int
    cache: str
    chunk: int | None

    def key(self, budget: int) -> BenchKey:
        how = "one forward" if self.chunk is None else f"chunks of {self.chunk}"
        return BenchKey(PREFILL, f"{self.cache}, {how}", self.length, None if self.cache == FULL else budget, 1)


def cases(settings: BenchSettings) -> Iterator[Case]:
    """What is read, the shortest prompts first."""
    first, *others = settings.policies
    for length in sorted(settings.contexts):
        yield Case(length, FULL, None)
        yield Case(length, FULL, settings.chunk)
        yield Case(length, first, settings.chunk)
        if length <= COMPARED:
            yield from (Case(length, first, chunk) for chunk in settings.chunks if chunk != settings.chunk)
            yield from (Case(length, policy, settings.chunk) for policy in others)


def measure_prefill(model: Any, settings: BenchSettings, case: Case) -> Row:
    """Seconds until the first token, those of the processor too: of a machine that others use, they say more."""

    def measure() -> dict[str, Any]:
        times, busy = [], []
        for _ in range(settings.rounds_of_answers(_ROUNDS if case.length <= _LONG else 1)):
            started = time.process_time()
            times.append(read_prompt(model, case, settings.budgets[0])[0])
            busy.append(time.process_time() - started)
        return {
            "cache": case.cache,
            "chunk": case.chunk,
            "seconds": round(median(times), 4),
            "cpu_seconds": round(median(busy), 4),
            "rounds_seconds": [round(seconds, 4) for seconds in times],
        }

    return attempt(case.key(settings.budgets[0]), measure)


@torch.inference_mode()
def read_prompt(model: Any, case: Case, budget: int) -> tuple[float, DynamicCache]:
    """Read a prompt of random ids up to the first token of the answer: seconds, and the cache."""
    needs = case.cache != FULL and make_policy(case.cache).needs.queries
    ids = torch.randint(0, model.config.vocab_size, (1, case.length), device=model.device)
    with own_attention(model) if needs else nullcontext():
        cache = DynamicCache(config=model.config)
        if case.cache != FULL:
            cache = PagedEvictionCache(model.config, budget=budget, policy=case.cache)
        watch = Stopwatch(model.device)
        for part in torch.arange(case.length, device=model.device)[None].split(case.chunk or case.length, dim=1):
            logits = feed(model, ids[:, part[0]], None, cache, positions=part)
        logits[:, -1].argmax(-1)
        return watch.lap(), cache

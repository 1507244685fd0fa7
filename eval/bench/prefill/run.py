"""`paged-eviction bench --preset prefill`: the time to the first token over the length of the prompt.

The full cache reads a prompt in one forward, or in the same chunks as this cache; a chunk then attends to all that was
read, so that time grows with the square of the length. A bounded cache attends to its budget and the chunk: time grows
with the length. Ids are random and so are the weights of a shape: time does not depend on them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.feeding import feed
from hf_paged_eviction.policies import make_policy
from hf_paged_eviction.queries.attention import PAGED_EVICTION

from ...models.environment import timed_on
from ...options.bench import BenchOptions
from ...running.efficiency import Stopwatch
from ...running.terminal import progress, say
from ...store.completion import Progress
from ...store.results import SUMMARY, ResultFolder, Row
from ...store.summaries.formats import to_terminal
from ..shapes import choose_device, make_model
from ..summary import a_shape, one_budget, refuse_others, threads
from .tables import COMPARED, FULL, tables

PRESET = "prefill"
#: Options that replace parts of the preset.
_TAKEN = {"model", "dtype", "device", "contexts", "rounds"}


@dataclass(frozen=True)
class PrefillSettings:
    """What is measured.

    Attributes:
        model: a shape.
        lengths: tokens of the prompt.
        chunk: tokens per forward where sizes are not compared.
        chunks: sizes that are compared, with the first of the policies.
        policies: that are compared at `chunk`.
        rounds: how often; None = 3 up to 8,192 tokens, else once.
    """

    model: str = "prefill"
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    budget: int = 1024
    chunk: int = 512
    chunks: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    policies: tuple[str, ...] = ("paged_eviction", "keydiff", "snapkv", "h2o")
    rounds: int | None = None

    def rounds_at(self, length: int) -> int:
        return self.rounds or (3 if length <= 8192 else 1)


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

    @property
    def key(self) -> tuple[int, str, int | None]:
        return self.length, self.cache, self.chunk

    @property
    def name(self) -> str:
        return f"{self.cache}, {'one forward' if self.chunk is None else f'chunks of {self.chunk}'}"


def cases(settings: PrefillSettings) -> Iterator[Case]:
    """What is read, the shortest prompts first."""
    first = settings.policies[0]
    for length in sorted(settings.lengths):
        yield Case(length, FULL, None)
        yield Case(length, FULL, settings.chunk)
        yield Case(length, first, settings.chunk)
        if length <= COMPARED:
            yield from (Case(length, first, chunk) for chunk in settings.chunks if chunk != settings.chunk)
            yield from (Case(length, policy, settings.chunk) for policy in settings.policies[1:])


def row_key(row: Row) -> tuple[int, str, int | None]:
    """The identity of a row."""
    return row["length"], row["cache"], row["chunk"]


def run(options: BenchOptions, output: Path) -> bool:
    """Measure what is missing in the folder, show and write; True, since all of it was measured or an error was raised.

    Raises:
        UserError: an option that the preset does not take, or results of other settings or another machine.
    """
    settings = read(options)
    device, notes = choose_device(options.device, "100m"), Console(stderr=True)
    with threads(options.threads):
        meaning = {**asdict(settings), "dtype": options.dtype, "machine": timed_on(device)}
        meaning = json.loads(json.dumps({name: meaning[name] for name in meaning if name not in ("lengths", "rounds")}))
        with ResultFolder(output, meaning, row_key).opened(options.again) as kept:
            _measure(kept, make_model(options.but(model=settings.model, device=device)), settings, notes)
            ordered = [kept.rows[case.key] for case in cases(settings)]
            found = {"settings": asdict(settings), "rows": ordered, "environment": timed_on(device)}
            kept.write_json(SUMMARY, found)
    for shown in tables(found):
        Console().print(to_terminal(shown))
    say(notes, f"written to {output}: results.jsonl, {SUMMARY}")
    return True


def read(options: BenchOptions) -> PrefillSettings:
    """The settings of a run.

    Raises:
        UserError: with the way out.
    """
    refuse_others(options, _TAKEN, PRESET, "which compares chunks and policies by itself")
    typed = {"budgets": ("budget", one_budget(options, PRESET)), "contexts": ("lengths", options.contexts)}
    typed |= {"rounds": ("rounds", options.rounds), "model": ("model", options.model)}
    given: dict[str, Any] = dict(typed[name] for name in typed if name in options.model_fields_set)
    if "model" in given:
        a_shape(options, PRESET)
    return PrefillSettings(**given)


def _measure(kept: ResultFolder, model: Any, settings: PrefillSettings, notes: Console) -> None:
    waiting = [case for case in cases(settings) if case.key not in kept.rows]
    total = len(list(cases(settings)))
    with progress(notes, "prompts") as watch:
        if waiting:
            watch(Progress(total - len(waiting), total, "getting ready"))
            read_prompt(model, Case(min(settings.lengths), FULL, None), settings)
        for index, case in enumerate(waiting):
            watch(Progress(total - len(waiting) + index, total, f"{case.length}: {case.name}"))
            kept.add([measure(model, case, settings)])
        watch(Progress(total, total))


def measure(model: Any, case: Case, settings: PrefillSettings) -> Row:
    """Seconds until the first token, those of the processor too: of a machine that others use, they say more."""
    times, busy = [], []
    for _ in range(settings.rounds_at(case.length)):
        started = time.process_time()
        times.append(read_prompt(model, case, settings)[0])
        busy.append(time.process_time() - started)
    return {
        **asdict(case),
        "seconds": round(median(times), 4),
        "cpu_seconds": round(median(busy), 4),
        "rounds": [round(each, 4) for each in times],
    }


@torch.inference_mode()
def read_prompt(model: Any, case: Case, settings: PrefillSettings) -> tuple[float, DynamicCache]:
    """Read a prompt of random ids up to the first token of the answer: seconds, and the cache."""
    needs = case.cache != FULL and make_policy(case.cache).needs.queries
    model.set_attn_implementation(PAGED_EVICTION if needs else "sdpa")
    ids = torch.randint(0, model.config.vocab_size, (1, case.length), device=model.device)
    cache = DynamicCache(config=model.config)
    if case.cache != FULL:
        cache = PagedEvictionCache(model.config, budget=settings.budget, policy=case.cache)
    step, watch = case.chunk or case.length, Stopwatch(model.device)
    logits: Tensor | None = None
    for start in range(0, case.length, step):
        part = ids[:, start : start + step]
        positions = torch.arange(start, start + part.shape[1], device=model.device)[None]
        logits = feed(model, part, None, cache, positions=positions)
    if logits is not None:
        logits[:, -1].argmax(-1)
    return watch.lap(), cache

"""What caches of different kinds are worth at the same device bytes: shared by `demote.py` and `rank.py`.

Accuracy as in `accuracy_over_bytes.py`: the tasks of the suite, the question after compression, as many tokens as fit
into a share of the bytes that the full cache takes in 16 bits. Everything counts. Answers are written as they are
given; the same command continues.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accuracy_over_bytes import FULL, accuracy, batch_answers, key, progress
from common import RESULTS, save

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval.prompting.prompts import make_batches
from hf_paged_eviction_eval.settings import TaskSettings
from hf_paged_eviction_eval.store.results import RowFile, read_lines
from hf_paged_eviction_eval.tasks import TASK_GROUPS


@dataclass(frozen=True)
class Fit:
    """What fits into some bytes.

    Attributes:
        tokens: in slots.
        demoted: in a low-bit store beside them.
        bytes: of all, for one row of a model of 16 bits.
        arguments: of the cache, for the model of 32 bits that is measured.
    """

    tokens: int
    demoted: int
    bytes: int
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A cache of so many bytes."""

    policy: str
    way: str
    share: float
    fit: Fit

    @property
    def name(self) -> str:
        return f"{self.policy} | {self.way} | {self.share}"

    @property
    def tokens(self) -> int:
        return self.fit.tokens

    @property
    def arguments(self) -> dict[str, Any]:
        return {"policy": self.policy, **self.fit.arguments}


#: The largest cache of a kind, by its name, of at most so many bytes in 16 bits; None where not even the smallest fits.
Fitting = Callable[[str, float, int], Fit | None]


# ---- bytes -----------------------------------------------------------------------------------------------------------


def empty(config: Any, tokens: int, block_size: int, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """A cache of so many slots for one row, with its storage."""
    made = PagedEvictionCache(config, budget=tokens, block_size=block_size, **options)
    made.early_initialization(1, config.num_key_value_heads, config.head_dim, dtype, torch.device("cpu"))
    return made


def full_bytes(config: Any, tokens: int, block_size: int) -> int:
    """Of a cache that holds so many tokens in 16 bits."""
    taken: int = empty(config, tokens, block_size, torch.bfloat16, {}).stats().storage_bytes
    return taken


def most_tokens(bytes_of: Callable[[int], int], most: float, block_size: int) -> int | None:
    """The largest number of tokens, whole blocks, at least three, that take no more; None where three take more."""
    low, high = 3, 4
    if bytes_of(low * block_size) > most:
        return None
    while bytes_of(high * block_size) <= most:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_of(middle * block_size) <= most else (low, middle)
    return low * block_size


# ---- accuracy --------------------------------------------------------------------------------------------------------


def answer_all(model: Any, tokenizer: Any, cases: Sequence[Case], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Scores of all prompts."""
    settings = TaskSettings(
        policies=(),
        budgets=(FULL,),
        block_size=options.block_size,
        tasks=TASK_GROUPS["suite"],
        lengths=(options.length,),
        question_aware=False,
        limit=options.samples,
        batch_size=options.batch_size,
        attn_implementation=PAGED_EVICTION,
    )
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work / "answers.jsonl"
    answers, batches = RowFile(path), list(make_batches(settings, tokenizer, model.config))
    done = set(read_lines([path], key)[0])
    with progress() as bar:
        task = bar.add_task("answers", total=len(batches) * len(cases))
        for batch in batches:
            for rows in batch_answers(model, tokenizer, settings, batch, cases, done, options.block_size, queries=True):
                answers.append(rows)
                bar.advance(task)
    answers.close()
    return [row for _, row in read_lines([path], key)[0].values()]


# ---- time ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def step_time(
    model: Any, length: int, ways: Sequence[str], fitting: Fitting, rounds: int, steps: int = 16
) -> dict[str, float]:
    """Milliseconds of CPU time of a decode step behind `length` tokens, at an eighth of the full cache's bytes."""
    text = torch.randint(5, model.config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0))
    most = full_bytes(model.config, length, 16) / 8
    caches = {}
    for way in ways:
        fit = fitting(way, most, 16)
        if fit is None:
            continue
        held = PagedEvictionCache(model.config, fit.tokens, policy="keydiff", **fit.arguments)
        for start in range(0, length, 1024):
            model(input_ids=text[:, start : start + 1024], past_key_values=held, use_cache=True, logits_to_keep=1)
        caches[way] = held
    times: dict[str, list[float]] = {way: [] for way in caches}
    for _ in range(rounds + 1):
        for way, held in caches.items():
            start_at = time.process_time()
            for _ in range(steps):
                model(input_ids=text[:, -1:], past_key_values=held, use_cache=True)
            times[way].append(1e3 * (time.process_time() - start_at) / steps)
    return {way: round(median(found[1:]), 3) for way, found in times.items()}


# ---- command ---------------------------------------------------------------------------------------------------------


def parser(about: str | None, name: str) -> argparse.ArgumentParser:
    """The options that both commands have."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--samples", type=int, default=16, help="prompts per task; 0 leaves accuracy as it was")
    made.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    made.add_argument("--block-size", type=int, default=8)
    made.add_argument("--batch-size", type=int, default=16)
    made.add_argument("--times", type=int, nargs="*", default=[1024, 8192], help="lengths at which steps are timed")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--work", type=Path, default=Path("results") / name, help="folder of the answers")
    return made


def measure(
    name: str,
    model: Any,
    tokenizer: Any,
    kinds: tuple[Sequence[str], Sequence[str], Sequence[float]],
    fitting: Fitting,
    options: argparse.Namespace,
    **more: Any,
) -> None:
    """Measure what was asked for, and write `results/NAME.json`; what is not measured now stays as it was.

    Args:
        kinds: policies, ways and shares of the bytes of the full cache.
        more: goes to the file.
    """
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    results, steps, settings = found.get("results", []), found.get("step_ms", {}), found.get("settings", {})
    policies, ways, shares = kinds
    if options.samples:
        full = full_bytes(model.config, options.length, options.block_size)
        fits = {(way, share): fitting(way, share * full, options.block_size) for way in ways for share in shares}
        cases = [
            Case(policy, way, share, fit)
            for policy in policies
            for (way, share), fit in fits.items()
            if fit is not None
        ]
        rows = answer_all(model, tokenizer, cases, options)
        settings = {each: getattr(options, each) for each in ("samples", "length", "block_size")}
        results = [
            {
                "policy": case.policy,
                "way": case.way,
                "share_of_bytes": case.share,
                "tokens": case.fit.tokens,
                "demoted": case.fit.demoted,
                "device_bytes": case.fit.bytes,
                **accuracy(rows, case.name),
            }
            for case in cases
        ]
        for row in results:
            print(*row.values(), sep="\t", flush=True)
    for length in options.times:
        steps[str(length)] = step_time(model, length, ways, fitting, options.rounds)
        print(length, steps[str(length)], flush=True)
    save(name, {"settings": settings, "results": results, "step_ms": steps, **more})

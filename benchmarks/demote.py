"""What demoting is worth on the embedded model at the same device bytes: `python benchmarks/demote.py --help`.

Accuracy as in `accuracy_over_bytes.py`: the tasks of the suite, the question after compression, as many tokens as fit
into a share of the bytes that the full cache takes in 16 bits. Dropping in 16, 4 and 2 bits stands beside two tiers.
Everything counts: levels, positions, scores, scales, and the tokens that `bits=` leaves as they came. Answers are
written as they are given; the same command continues.

Steps: CPU time of a decode step behind a long text, at the same bytes, every variant in turn.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accuracy_over_bytes import FULL, accuracy, batch_answers, key, progress
from common import RESULTS, save

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.prompting.prompts import make_batches
from hf_paged_eviction_eval.settings import TaskSettings
from hf_paged_eviction_eval.store.results import RowFile, read_lines
from hf_paged_eviction_eval.tasks import TASK_GROUPS

POLICIES = ("keydiff", "paged_eviction")
SHARES = (0.0625, 0.125)
#: By name: bits of all tokens, or bits, share and balance of those that are demoted.
WAYS: dict[str, tuple[Any, ...]] = {
    "drop": (None,),
    "bits=4": (4,),
    "bits=2": (2,),
    "demote(bits=2)": (2, 0.5, "rotation"),
    "demote(bits=2, balance=queries)": (2, 0.5, "queries"),
    "demote(bits=2, balance=none)": (2, 0.5, "none"),
    "demote(bits=2, share=0.75)": (2, 0.75, "rotation"),
    "demote(bits=4)": (4, 0.5, "rotation"),
}


@dataclass(frozen=True)
class Fit:
    """What fits into some bytes.

    Attributes:
        tokens: in slots.
        demoted: in the low-bit store.
        bytes: of both, for one row of a model of 16 bits.
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


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _held(config: Any, tokens: int, block_size: int, dtype: torch.dtype, options: tuple[tuple[str, Any], ...]) -> Any:
    """Bytes of a cache of so many slots, one row, as it says itself; and its places for demoted tokens."""
    made = PagedEvictionCache(config, budget=tokens, block_size=block_size, **dict(options))
    heads, width = config.num_key_value_heads, config.head_dim
    made.early_initialization(1, heads, width, dtype, torch.device("cpu"))
    total, places = made.stats().storage_bytes, 0
    for _, layer in made.paged_layers:
        if "disposal" in dict(options):
            layer.outlet.start(1, heads, 1, tokens, torch.device("cpu"))
            total += layer.outlet.snapshot().bytes
            places = layer.outlet.places
    return total, places


def fitting(config: Any, way: str, most: float, block_size: int) -> Fit | None:
    """The largest cache of at most so many bytes in 16 bits; None where not even the smallest fits."""
    bits, *demoted = WAYS[way]
    options: dict[str, Any] = {} if bits is None else {"bits": bits}
    if demoted:
        share, balance = demoted
        options = {"disposal": f"demote(bits={bits}, share={share}, balance={balance})"}

    def held(blocks: int) -> tuple[int, int]:
        return _held(config, blocks * block_size, block_size, torch.bfloat16, tuple(options.items()))

    low, high = 2, 4
    if held(3)[0] > most:
        return None
    while held(high)[0] <= most:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held(middle)[0] <= most else (low, middle)
    total, places = held(low)
    if demoted:
        options = {"disposal": _as_many(config, low * block_size, block_size, places, bits, balance)}
    return Fit(low * block_size, places, total, options)


def _as_many(config: Any, tokens: int, block_size: int, places: int, bits: int, balance: str) -> str:
    """The disposal that has so many places where slots are of 32 bits."""
    low, high = 0.0, 1.0
    while True:
        share = (low + high) / 2
        text = f"demote(bits={bits}, share={share!r}, balance={balance})"
        try:
            found = _held(config, tokens, block_size, torch.float32, (("disposal", text),))[1]
        except ValueError:  # no room for a token
            found = 0
        if found == places:
            return text
        low, high = (share, high) if found < places else (low, share)


def all_cases(config: Any, options: argparse.Namespace) -> Iterator[Case]:
    size = options.block_size
    full = _held(config, options.length, size, torch.bfloat16, ())[0]
    fits = {(way, share): fitting(config, way, share * full, size) for way, share in product(WAYS, SHARES)}
    for policy, ((way, share), fit) in product(POLICIES, fits.items()):
        if fit is not None:
            yield Case(policy, way, share, fit)


# ---- accuracy --------------------------------------------------------------------------------------------------------


def answer_all(model: Any, tokenizer: Any, cases: list[Case], options: argparse.Namespace) -> list[dict[str, Any]]:
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
def step_time(model: Any, length: int, rounds: int, steps: int = 16) -> dict[str, float]:
    """Milliseconds of CPU time of a decode step behind `length` tokens, at an eighth of the full cache's bytes."""
    text = torch.randint(5, model.config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0))
    full = _held(model.config, length, 16, torch.bfloat16, ())[0]
    caches = {}
    for way in WAYS:
        fit = fitting(model.config, way, full / 8, 16)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16, help="prompts per task; 0 leaves accuracy as it was")
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--times", type=int, nargs="*", default=[1024, 8192], help="lengths at which steps are timed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", type=Path, default=Path("results/demote"), help="folder of the answers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation=PAGED_EVICTION)
    path = RESULTS / "demote.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    results, steps = found.get("results", []), found.get("step_ms", {})
    settings = found.get("settings", {})
    if options.samples:
        cases = list(all_cases(model.config, options))
        rows = answer_all(model, tokenizer, cases, options)
        settings = {name: getattr(options, name) for name in ("samples", "length", "block_size")}
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
        steps[str(length)] = step_time(model, length, options.rounds)
        print(length, steps[str(length)], flush=True)
    save("demote", {"settings": settings, "results": results, "step_ms": steps})


if __name__ == "__main__":
    main()

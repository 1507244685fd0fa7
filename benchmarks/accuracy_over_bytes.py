"""Accuracy over bytes on the embedded model: `python benchmarks/accuracy_over_bytes.py --help`.

Many tokens in few bits against few tokens in many: every policy at every precision answers the tasks of the suite with
as many tokens as fit into a share of the bytes that the full cache takes. All counts: levels, the tokens that stay as
they came, and what says where they are, as the cache itself counts them for a model of 16 bits. The question comes
after the prompt was compressed. Answers are written as they are given; the same command continues.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import torch
from common import RESULTS
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.caches import empty_cache
from hf_paged_eviction_eval.environment import timed_on
from hf_paged_eviction_eval.prompting.prompts import Batch, make_batches
from hf_paged_eviction_eval.prompting.suites import score
from hf_paged_eviction_eval.running.decoding import decode
from hf_paged_eviction_eval.running.generation import Generator
from hf_paged_eviction_eval.running.start import Reader
from hf_paged_eviction_eval.settings import TaskSettings
from hf_paged_eviction_eval.store.results import RowFile, read_lines
from hf_paged_eviction_eval.summaries.plot_style import save
from hf_paged_eviction_eval.tasks import TASK_GROUPS

POLICIES = ("paged_eviction", "keydiff", "calibrated:embedded", "recency")
BITS = (None, 8, 4, 2)
SHARES = (0.03, 0.0625, 0.125, 0.25, 0.5)
FULL = "full"
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "accuracy_over_bytes.png"


@dataclass(frozen=True)
class Case:
    """A cache.

    Attributes:
        tokens: that fit; None = more than the text has, so that no policy has anything to do.
    """

    policy: str
    bits: int | None
    share: float
    tokens: int | None

    @property
    def name(self) -> str:
        return f"{self.policy if self.tokens else 'all tokens'}, {self.bits} bits, {self.tokens or ''}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the cache, beside its size."""
        return {"policy": self.policy, "bits": self.bits}


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    model, tokenizer = embedded.load(attn_implementation=PAGED_EVICTION)
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
    cases = list(all_cases(model.config, options))
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work / "answers.jsonl"
    answers, batches = RowFile(path), list(make_batches(settings, tokenizer, model.config))
    done = set(read_lines([path], key)[0])
    with progress() as bar:
        task = bar.add_task("answers", total=len(batches) * len(dict.fromkeys(case.name for case in cases)))
        for batch in batches:
            for rows in batch_answers(model, tokenizer, settings, batch, cases, done, options.block_size):
                answers.append(rows)
                bar.advance(task)
    answers.close()
    found = [row for _, row in read_lines([path], key)[0].values()]
    report(found, cases, options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16, help="prompts per task")
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("results/accuracy_over_bytes"), help="folder of the answers")
    return parser.parse_args()


def progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn())


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["case"], row["task"], row["id"]


# ---- bytes ------------------------------------------------------------------------------------------------------


def storage_bytes(config: Any, tokens: int, bits: int | None, block_size: int) -> int:
    """What a cache of so many tokens takes, as it says itself, for one row of a model of 16 bits."""
    made = empty_cache(config, torch.bfloat16, budget=tokens, block_size=block_size, bits=bits)
    return made.stats().storage_bytes


def all_cases(config: Any, options: argparse.Namespace) -> Iterator[Case]:
    """All policies, precisions and shares. What fits in whole is one case, whatever the policy."""
    size = options.block_size
    full = storage_bytes(config, options.length, None, size)
    budgets = range(3 * size, options.length + size, size)
    takes = {(bits, tokens): storage_bytes(config, tokens, bits, size) for bits in BITS for tokens in budgets}
    for policy, bits, share in product(POLICIES, BITS, SHARES):
        fitting = [tokens for tokens in budgets if takes[bits, tokens] <= share * full]
        if fitting:
            yield Case(policy, bits, share, fitting[-1] if fitting[-1] < options.length else None)
    yield from (Case("recency", bits, 1.0, None) for bits in BITS)


# ---- answers ----------------------------------------------------------------------------------------------------


def batch_answers(
    model: Any,
    tokenizer: Any,
    settings: TaskSettings,
    batch: Batch,
    cases: Sequence[Any],
    done: set[tuple[Any, ...]],
    block_size: int,
    queries: bool = False,
) -> Iterator[list[dict[str, Any]]]:
    """The answers of a batch of prompts, case by case; an empty list for what is done.

    Args:
        cases: with `name`, `tokens` and `arguments`, as `Case` has them.
        queries: some of them ask for queries.
    """
    samples = [prompt.sample for prompt in batch.prompts]
    generator = Generator(model, tokenizer, any(sample.stop_at_newline for sample in samples))
    reader = Reader(model, settings, generator)
    inputs, source = reader.inputs(batch.prompts), None
    for case in {case.name: case for case in cases}.values():
        if all((case.name, batch.task, sample.id) in done for sample in samples):
            yield []
            continue
        source = source or reader.source(batch.prompts, queries=queries)
        tokens = case.tokens or -(-(inputs.ids.shape[1] + 256) // block_size) * block_size
        held = PagedEvictionCache(
            model.config,
            budget=tokens,
            block_size=block_size,
            **case.arguments,
            attention_mask=inputs.context_mask,
        )
        start = reader.start(inputs, held, source)
        answers = decode(generator, inputs, start, [sample.max_new_tokens for sample in samples]).answers
        yield [
            {
                "case": case.name,
                "task": batch.task,
                "id": sample.id,
                "score": score(sample, generator.text(answer), settings),
            }
            for sample, answer in zip(samples, answers, strict=True)
        ]


# ---- report -----------------------------------------------------------------------------------------------------


def accuracy(rows: list[dict[str, Any]], name: str) -> dict[str, float | int]:
    """Mean over tasks, and its standard error over prompts."""
    by_task = defaultdict(list)
    for row in rows:
        if row["case"] == name:
            by_task[row["task"]].append(row["score"])
    spread = [variance(scores) / len(scores) if len(scores) > 1 else 0.0 for scores in by_task.values()]
    return {
        "accuracy": round(fmean(map(fmean, by_task.values())), 4),
        "error": round(math.sqrt(sum(spread)) / len(spread), 4),
        "prompts": sum(map(len, by_task.values())),
    }


def report(rows: list[dict[str, Any]], cases: list[Case], options: argparse.Namespace) -> None:
    """Write the results and the plot."""
    found = []
    for case in cases:
        held = {"policy": case.policy, "bits": case.bits, "share_of_bytes": case.share, "tokens": case.tokens}
        found.append(held | accuracy(rows, case.name))
    settings = {name: value for name, value in vars(options).items() if name != "work"}
    results = {"command": "python benchmarks/accuracy_over_bytes.py", "model": "embedded", "settings": settings}
    path = RESULTS / "accuracy_over_bytes.json"
    path.write_text(json.dumps({"environment": timed_on(), **results, "results": found}, indent=2) + "\n")
    for row in found:
        print(*row.values(), sep="\t")
    plot(found, IMAGE)


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """A panel per policy, a line per precision."""
    figure = Figure(figsize=(11, 3.4))
    panels = figure.subplots(1, len(POLICIES), sharey=True)
    for axes, policy in zip(panels, POLICIES, strict=True):
        for bits, colour, marker in zip(BITS, ("#000000", "#0072B2", "#009E73", "#D55E00"), "oDs^", strict=True):
            line = [
                row for row in found if (row["policy"], row["bits"]) == (policy, bits) and row["share_of_bytes"] < 1
            ]
            axes.errorbar(
                [100 * row["share_of_bytes"] for row in line],
                [row["accuracy"] for row in line],
                [row["error"] for row in line],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1,
                label="16 bits" if bits is None else f"{bits} bits",
            )
        full = next(row["accuracy"] for row in found if row["share_of_bytes"] == 1 and row["bits"] is None)
        axes.axhline(full, color="grey", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks([100 * share for share in SHARES], [f"{100 * share:g} %" for share in SHARES], fontsize=8)
        axes.set_title(policy.partition(":")[0])
    panels[0].set_ylabel("accuracy, mean of the tasks")
    panels[0].legend(frameon=False, fontsize=8)
    figure.supxlabel("bytes, as a share of the full cache in 16 bits", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


if __name__ == "__main__":
    main()

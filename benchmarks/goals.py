"""What the project wants to reach, and whether a run shows it: `python benchmarks/goals.py cpu`.

Runs `paged-eviction bench` as in `RUNS`, into `benchmarks/results/bench_NAME`, and writes the verdicts
into its `summary.json`. Those of a GPU are what `make gpu` measures in its steps `decode` and `answers`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_paged_eviction_eval.bench.methods import FLOOR, FLOOR_COMPILED, FULL, PAGED, STATIC
from hf_paged_eviction_eval.bench.rows import DECODE, MEASURED, THROUGHPUT, BenchKey, make_row, ratio
from hf_paged_eviction_eval.bench.table import beside, step_ratio
from hf_paged_eviction_eval.store.results import Row

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
CPU, H200 = "cpu", "h200"
#: Rows of `update.py`.
UPDATE = "update"
_ALL = "floor,paged,full,floor_compiled,paged_static,paged_static_own"
#: What is run for each set of goals.
RUNS = {
    CPU: (
        "--model 100m --device cpu --threads 1 --contexts 2048,32768 --budgets 1024 --batch-sizes 1 --steps 16 "
        f"--variants {_ALL}",
    ),
    H200: (
        f"--model llama-3.2-1b --contexts 8192,131072 --budgets 1024,2048 --batch-sizes 1,32 --variants {_ALL}",
        "--preset paper --model llama-3.2-1b --budgets 1024 --variants full,paged,paged_static,paged_static_own",
    ),
}
_128K = 131072
#: In place of a context: the longest of the rows.
LONGEST = -1
Rows = Sequence[Row]


@dataclass(frozen=True)
class Goal:
    """A number of a run and its limit, to stay `at_most` at or to reach.

    Attributes:
        numbers: of rows, one list for each variant that a user may choose from: the worst number of each list counts,
            and the best of these.
        unit: "x" for a ratio, "%" for a share.
    """

    text: str
    limit: float
    at_most: bool
    numbers: Callable[[Rows], Iterable[Sequence[float]]]
    unit: str = "x"

    def measure(self, rows: Rows) -> float | None:
        """The number in the rows of a run; None if they do not have it."""
        worst, best = (max, min) if self.at_most else (min, max)
        return best((worst(numbers) for numbers in self.numbers(rows) if numbers), default=None)


def steps(
    variants: Sequence[str], number: Callable[[Rows, Row], float | None], context: int | None = None, batch: int = 0
) -> Callable[[Rows], list[list[float]]]:
    """A number of the decode steps of each variant, of one context (`LONGEST`: the longest that was measured) and batch
    or of all."""

    def of_variant(rows: Rows, name: str) -> list[float]:
        decoded = [row for row in rows if (row["kind"], row["variant"], row["status"]) == (DECODE, name, MEASURED)]
        decoded = [row for row in decoded if batch in (0, row["batch_size"])]
        wanted = max((row["context"] for row in decoded), default=None) if context == LONGEST else context
        values = [number(rows, row) for row in decoded if wanted in (None, row["context"])]
        return [value for value in values if value is not None]

    return lambda rows: [of_variant(rows, name) for name in variants]


def over(variant: str, context: int | None = None) -> Callable[[Rows, Row], float | None]:
    """A step in relation to another one that was timed in turn."""
    return lambda rows, row: step_ratio(row, beside(rows, row, variant, context))


def of_full(rows: Rows, row: Row) -> float | None:
    """How many times as long the full cache takes at 128k."""
    return step_ratio(beside(rows, row, FULL, _128K), row)


def column(name: str) -> Callable[[Rows, Row], float | None]:
    return lambda rows, row: row[name]


@dataclass(frozen=True)
class Verdict:
    """A goal beside what was measured."""

    goal: str
    limit: str
    value: float | None
    shown: str
    verdict: str


def judge(name: str, rows: Rows) -> list[Verdict]:
    """Every goal of a set."""
    return [_judge(goal, goal.measure(rows)) for goal in GOALS[name]]


def _judge(goal: Goal, value: float | None) -> Verdict:
    limit = f"{'<=' if goal.at_most else '>='} {_show(goal.limit, goal.unit, short=True)}"
    if value is None:
        return Verdict(goal.text, limit, None, "", NOT_MEASURED)
    fine = value <= goal.limit if goal.at_most else value >= goal.limit
    return Verdict(goal.text, limit, value, _show(value, goal.unit), MET if fine else MISSED)


def _show(value: float, unit: str, short: bool = False) -> str:
    if unit == "%":
        return f"{100 * value:.4g} %" if short else f"{100 * value:.2f} %"
    return f"{value:.4g} x" if short else f"{value:.3f} x"


def _update_speedup(rows: Rows) -> list[list[float]]:
    rounds = {row["variant"]: row["rounds_us"] for row in rows if row["kind"] == UPDATE}
    return [[ratio(rounds[FULL], rounds[PAGED])]] if rounds.keys() >= {FULL, PAGED} else []


def _throughput_ratios(rows: Rows) -> list[list[float]]:
    """The eager and the static cache against the full one."""
    measured = {row["variant"]: row for row in rows if row["kind"] == THROUGHPUT and row["status"] == MEASURED}
    sizes = {(row["input_tokens"], row["output_tokens"], row["requests"]) for row in measured.values()}
    if sizes != {(1024, 8192, 64)} or FULL not in measured:
        return []
    rates = [measured[name]["tokens_per_second"] for name in (PAGED, *STATIC) if name in measured]
    return [[rate / measured[FULL]["tokens_per_second"]] for rate in rates]


_STEP = "step of this cache"
_UPDATE = "update: DynamicCache at 4k / this cache at 2k, 8 KV heads of 128"
_FLOOR, _LIMIT = "static step / floor compiled the same way", "static step, share of the bandwidth limit"
_LONG = "full DynamicCache / static step at 128k, batch 1"
_WHOLE = "throughput, 1,024 in and 8,192 out: this cache / full"
GOALS: dict[str, tuple[Goal, ...]] = {
    CPU: (
        Goal(f"{_STEP} at budget C / floor of C tokens", 1.02, True, steps([PAGED], over(FLOOR), LONGEST)),
        Goal(f"{_STEP}, context 32k / 2k", 1.05, True, steps([PAGED], over(PAGED, 2048), 32768)),
        Goal("time of the step in choosing victims", 0.01, True, steps([PAGED], column("eviction_share")), "%"),
        Goal(_UPDATE, 50, False, _update_speedup),
    ),
    H200: (
        *(Goal(f"{_FLOOR}, batch {n}", 1.0, True, steps(STATIC, over(FLOOR_COMPILED), LONGEST, n)) for n in (1, 32)),
        *(
            Goal(f"{_LIMIT}, batch {n}", 0.6, False, steps(STATIC, column("bandwidth_share"), None, n), "%")
            for n in (1, 32)
        ),
        Goal(_LONG, 10, False, steps(STATIC, of_full, _128K, 1)),
        Goal(_WHOLE, 3, False, _throughput_ratios),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RUNS)
    name = parser.parse_args().name
    folder = Path(__file__).parent / "results" / f"bench_{name}"
    parts = [folder if len(RUNS[name]) == 1 else folder / str(number) for number in range(len(RUNS[name]))]
    for words, part in zip(RUNS[name], parts, strict=True):
        command = [sys.executable, "-m", "hf_paged_eviction_eval", "bench", *words.split(), "--output", str(part)]
        subprocess.run(command, check=True)
    summaries = [json.loads((part / "summary.json").read_text("utf-8")) for part in parts]
    rows = [row for summary in summaries for row in summary["rows"] if row["kind"] != UPDATE] + updates(name)
    verdicts = judge(name, rows)
    for one in verdicts:
        print(f"{one.goal}: {one.limit}, {one.shown or 'no number'}, {one.verdict}")
    content = {**summaries[0], "rows": rows, "goals": [asdict(verdict) for verdict in verdicts]}
    (folder / "summary.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def updates(name: str) -> list[Row]:
    """Rows of one layer's `update`, on the device of the goals."""
    import torch
    from update import BUDGET, CONTEXT, time_updates

    times = time_updates(["paged_eviction"], torch.device("cpu" if name == CPU else "cuda"), 9)
    keys = {variant: BenchKey(UPDATE, FULL if variant == FULL else PAGED, CONTEXT, BUDGET, 1) for variant in times}
    return [
        make_row(keys[variant], MEASURED, rounds_us=[1e6 * value for value in seconds])
        for variant, seconds in times.items()
    ]


if __name__ == "__main__":
    main()

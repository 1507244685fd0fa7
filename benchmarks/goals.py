"""What the project wants to reach, and whether a run shows it: `python benchmarks/goals.py cpu`.

Runs `paged-eviction bench` as in `RUNS`, into `benchmarks/results/bench_NAME`, and writes the verdicts
into its `summary.json`. Those of a GPU are what `make gpu` measures in its steps `decode` and `answers`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_paged_eviction_eval.bench.rows import DECODE, MEASURED, THROUGHPUT, BenchKey, make_row
from hf_paged_eviction_eval.bench.table import beside, step_ratio
from hf_paged_eviction_eval.bench.timing import ratio
from hf_paged_eviction_eval.bench.variants import FLOOR, FLOOR_COMPILED, FULL, PAGED, STATIC
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


#: The number of a goal in the rows of a run; None if they do not have it.
Measure = Callable[[Sequence[Row]], "float | None"]


@dataclass(frozen=True)
class Goal:
    """A number of a run and its limit.

    Attributes:
        text: what is measured.
        limit: to stay at or below, or to reach.
        at_most: which of the two; of several rows the worst counts.
        variants: whose steps; of several, which a user may choose from, the best counts.
        context: of their rows; `LONGEST`: the longest that was measured; None: all.
        batch: of their rows; None: all.
        against: the variant and the context of the row that was timed in turn and that each is divided by.
        inverse: it is divided by each instead.
        column: the number in their rows, where nothing is divided.
        other: what is measured instead of steps.
        unit: "x" for a ratio, "%" for a share.
    """

    text: str
    limit: float
    at_most: bool
    variants: tuple[str, ...] = ()
    context: int | None = None
    batch: int | None = None
    against: tuple[str, int | None] | None = None
    inverse: bool = False
    column: str | None = None
    other: Measure | None = None
    unit: str = "x"

    def measure(self, rows: Sequence[Row]) -> float | None:
        """The number in the rows of a run; None if they do not have it."""
        if self.other is not None:
            return self.other(rows)
        worst, best = (max, min) if self.at_most else (min, max)
        per_part = [
            [value for row in self._rows(rows, name) if (value := self._value(rows, row)) is not None]
            for name in self.variants
        ]
        return best((worst(values) for values in per_part if values), default=None)

    def _rows(self, rows: Sequence[Row], variant: str) -> list[Row]:
        decoded = [row for row in _decoded(rows, variant) if self.batch in (None, row["batch_size"])]
        longest = max((row["context"] for row in decoded if self.context == LONGEST), default=None)
        wanted = longest if self.context == LONGEST else self.context
        return [row for row in decoded if wanted in (None, row["context"])]

    def _value(self, rows: Sequence[Row], row: Row) -> float | None:
        if self.against is None:
            value: float | None = row[str(self.column)]
            return value
        other = beside(rows, row, *self.against)
        return step_ratio(other, row) if self.inverse else step_ratio(row, other)


@dataclass(frozen=True)
class Verdict:
    """A goal beside what was measured."""

    goal: str
    limit: str
    value: float | None
    shown: str
    verdict: str


def judge(name: str, rows: Sequence[Row]) -> list[Verdict]:
    """Every goal of a set."""
    return [_judge(goal, rows) for goal in GOALS[name]]


def _judge(goal: Goal, rows: Sequence[Row]) -> Verdict:
    value = goal.measure(rows)
    limit = f"{'<=' if goal.at_most else '>='} {_show(goal.limit, goal.unit, short=True)}"
    if value is None:
        return Verdict(goal.text, limit, None, "", NOT_MEASURED)
    fine = value <= goal.limit if goal.at_most else value >= goal.limit
    return Verdict(goal.text, limit, value, _show(value, goal.unit), MET if fine else MISSED)


def _show(value: float, unit: str, short: bool = False) -> str:
    if unit == "%":
        return f"{100 * value:.4g} %" if short else f"{100 * value:.2f} %"
    return f"{value:.4g} x" if short else f"{value:.3f} x"


def _decoded(rows: Sequence[Row], variant: str) -> list[Row]:
    return [row for row in rows if row["kind"] == DECODE and row["variant"] == variant and row["status"] == MEASURED]


def _update_speedup(rows: Sequence[Row]) -> float | None:
    rounds = {row["variant"]: row["rounds_us"] for row in rows if row["kind"] == UPDATE}
    return ratio(rounds[FULL], rounds[PAGED]) if rounds.keys() >= {FULL, PAGED} else None


def _throughput_ratio(rows: Sequence[Row]) -> float | None:
    """The faster of the eager and the static cache against the full one."""
    measured = {row["variant"]: row for row in rows if row["kind"] == THROUGHPUT and row["status"] == MEASURED}
    sizes = {(row["input_tokens"], row["output_tokens"], row["requests"]) for row in measured.values()}
    rates: list[Any] = [measured[name]["tokens_per_second"] for name in (PAGED, *STATIC) if name in measured]
    if sizes != {(1024, 8192, 64)} or not rates or FULL not in measured:
        return None
    return float(max(rates) / measured[FULL]["tokens_per_second"])


_FLOOR = "static step / floor compiled the same way, batch {}"
_LIMIT = "static step, share of the bandwidth limit, batch {}"
_LONG = "full DynamicCache / static step at 128k, batch 1"
_UPDATE = "update: DynamicCache at 4k / this cache at 2k, 8 KV heads of 128"
_WHOLE = "throughput, 1,024 in and 8,192 out: this cache / full"
GOALS: dict[str, tuple[Goal, ...]] = {
    CPU: (
        Goal(
            "step of this cache at budget C / floor of C tokens", 1.02, True, (PAGED,), LONGEST, against=(FLOOR, None)
        ),
        Goal("step of this cache, context 32k / 2k", 1.05, True, (PAGED,), 32768, against=(PAGED, 2048)),
        Goal("time of the step in choosing victims", 0.01, True, (PAGED,), column="eviction_share", unit="%"),
        Goal(_UPDATE, 50, False, other=_update_speedup),
    ),
    H200: (
        *(Goal(_FLOOR.format(n), 1.0, True, STATIC, LONGEST, n, against=(FLOOR_COMPILED, None)) for n in (1, 32)),
        *(Goal(_LIMIT.format(n), 0.6, False, STATIC, batch=n, column="bandwidth_share", unit="%") for n in (1, 32)),
        Goal(_LONG, 10, False, STATIC, _128K, 1, against=(FULL, _128K), inverse=True),
        Goal(_WHOLE, 3, False, other=_throughput_ratio),
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

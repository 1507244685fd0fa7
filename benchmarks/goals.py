"""What the project wants to reach on a CPU, and whether a run shows it: `python benchmarks/goals.py`.

Runs `paged-eviction bench` into `benchmarks/results/bench_cpu`, and writes the verdicts into its `summary.json`. What a
GPU does is measured by `make gpu`, in its steps `decode` and `answers`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_paged_eviction_eval.bench.rows import MEASURED, ratio
from hf_paged_eviction_eval.bench.table import ratio_rows, step_ratio
from hf_paged_eviction_eval.bench.variants import FLOOR, FULL, PAGED
from hf_paged_eviction_eval.store.results import Row

FOLDER = Path(__file__).parent / "results" / "bench_cpu"
OPTIONS = (
    "--model 100m --device cpu --threads 1 --contexts 2048,32768 --budgets 1024 --batch-sizes 1 --steps 16 "
    "--variants floor,paged,full,floor_compiled,paged_static,paged_static_own"
)
#: Rows of `update.py`.
UPDATE = "update"


def judge(rows: Sequence[Row]) -> Iterator[dict[str, str | float | None]]:
    """Every goal, its limit, and the number of the run; None if it does not have it."""
    for goal, limit, unit, value in _numbers(rows):
        fine = value is not None and (value >= limit if goal.startswith("update") else value <= limit)
        shown = "" if value is None else f"{100 * value:.2f} %" if unit == "%" else f"{value:.3f} x"
        sign = ">=" if goal.startswith("update") else "<="
        yield {
            "goal": goal,
            "limit": f"{sign} {100 * limit:.4g} %" if unit == "%" else f"{sign} {limit:.4g} x",
            "value": value,
            "shown": shown,
            "verdict": "not measured" if value is None else "met" if fine else "missed",
        }


def _numbers(rows: Sequence[Row]) -> Iterator[tuple[str, float, str, float | None]]:
    """Goal, limit, unit and number; of several the worst."""
    decoded = [row for row in rows if row.get("kind") != UPDATE and row["status"] == MEASURED]
    steps = {row["context"]: row for row in decoded if row["variant"] == PAGED}
    ratios = {context: value for pair, context, value in ratio_rows(decoded) if pair == f"{PAGED} / {FLOOR}"}
    yield "step of this cache at budget C / floor of C tokens", 1.02, "x", ratios.get(max(steps, default=0))
    yield "step of this cache, context 32k / 2k", 1.05, "x", step_ratio(steps.get(32768), steps.get(2048))
    victims = max((row["eviction_share"] for row in steps.values()), default=None)
    yield "time of the step in choosing victims", 0.01, "%", victims
    rounds = {row["variant"]: row["rounds_us"] for row in rows if row.get("kind") == UPDATE}
    update = ratio(rounds[FULL], rounds[PAGED]) if rounds.keys() >= {FULL, PAGED} else None
    yield "update: DynamicCache at 4k / this cache at 2k, 8 KV heads of 128", 50, "x", update


def main() -> None:
    command = [sys.executable, "-m", "hf_paged_eviction_eval", "bench", *OPTIONS.split(), "--output", str(FOLDER)]
    subprocess.run(command, check=True)
    summary = json.loads((FOLDER / "summary.json").read_text("utf-8"))
    rows = [*summary["rows"], *updates()]
    verdicts = list(judge(rows))
    for one in verdicts:
        print(f"{one['goal']}: {one['limit']}, {one['shown'] or 'no number'}, {one['verdict']}")
    content = {**summary, "rows": rows, "goals": verdicts}
    (FOLDER / "summary.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def updates() -> list[Row]:
    """Rows of one layer's `update`."""
    import torch
    from update import time_updates

    times = time_updates(["paged_eviction"], torch.device("cpu"), 9)
    return [
        {"kind": UPDATE, "variant": FULL if name == FULL else PAGED, "rounds_us": [1e6 * value for value in seconds]}
        for name, seconds in times.items()
    ]


if __name__ == "__main__":
    main()

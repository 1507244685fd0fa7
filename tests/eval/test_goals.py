"""Goals of the project: which number of which row counts, and what is met."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra `eval` is not installed")

from benchmarks.goals import CPU, GOALS, H200, RUNS, UPDATE, judge
from hf_paged_eviction_eval.bench.rows import DECODE, FAILED, MEASURED, THROUGHPUT, BenchKey, make_row
from hf_paged_eviction_eval.store.results import Row


def decoded(variant: str, context: int | None, rounds: list[float], batch: int = 1, **numbers: Any) -> Row:
    numbers = {"eviction_share": None, "bandwidth_share": None} | numbers
    return make_row(BenchKey(DECODE, variant, context, 1024, batch), MEASURED, rounds_ms=rounds, **numbers)


def answered(variant: str, rate: float, output: int = 8192) -> Row:
    key = BenchKey(THROUGHPUT, variant, 1024, 1024, None)
    sizes = {"requests": 64, "input_tokens": 1024, "output_tokens": output}
    return make_row(key, MEASURED, tokens_per_second=rate, **sizes)


def verdicts(name: str, rows: list[Row]) -> list[tuple[str, float | None]]:
    return [(goal.verdict, goal.value) for goal in judge(name, rows)]


def test_goals_of_a_cpu() -> None:
    rows = [
        decoded("floor", None, [10.0, 20.0, 10.0]),
        decoded("paged", 2048, [30.0, 30.0, 30.0], eviction_share=0.004),
        decoded("paged", 32768, [10.2, 20.4, 30.0], eviction_share=0.02),
    ]
    for variant, time in (("full", 1000.0), ("paged", 20.0)):
        rows.append(make_row(BenchKey(UPDATE, variant, 4096, 2048, 1), MEASURED, rounds_us=[time, time]))
    # The ratio is that of the longest context, its median over rounds; a limit that is just reached is met.
    assert verdicts(CPU, rows) == [
        ("met", pytest.approx(1.02)),
        ("met", pytest.approx(0.68)),
        ("missed", 0.02),
        ("met", 50.0),
    ]
    assert {verdict for verdict, _ in verdicts(CPU, [])} == {"not measured"}
    failed = [make_row(BenchKey(DECODE, "floor", None, 1024, 1), FAILED, "reason"), *rows[1:]]
    assert [verdict for verdict, _ in verdicts(CPU, failed)] == ["not measured", "met", "missed", "met"]


def test_goals_of_a_gpu() -> None:
    rows = [
        decoded("floor_compiled", None, [1.0, 1.0]),
        decoded("paged_static", 8192, [0.5, 0.5], bandwidth_share=0.9),
        decoded("paged_static", 131072, [1.2, 1.2], bandwidth_share=0.55),
        decoded("paged_static_own", 131072, [0.9, 0.9], bandwidth_share=0.7),
        decoded("full", 131072, [9.0, 9.9]),
        answered("full", 100.0),
        answered("paged", 290.0),
        answered("paged_static", 310.0),
    ]
    goals = judge(H200, rows)
    assert [goal.verdict for goal in goals] == ["met", "not measured", "met", "not measured", "met", "met"]
    assert [goal.value for goal in goals] == [0.9, None, 0.7, None, pytest.approx(10.5), 3.1]
    # Another test than the paper's says nothing about the goal.
    small = [*rows[:5], answered("full", 100.0, 128), answered("paged", 900.0, 128)]
    assert judge(H200, small)[-1].verdict == "not measured"
    missed = [decoded("floor_compiled", None, [1.0, 1.0]), decoded("paged_static", 8192, [1.001, 1.001])]
    assert judge(H200, missed)[0].verdict == "missed"
    assert set(GOALS) == set(RUNS) == {CPU, H200}

"""Goals of the project: which number of which row counts, and what is met."""

from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra `eval` is not installed")

from benchmarks.goals import UPDATE, judge
from hf_paged_eviction_eval.bench.rows import FAILED, MEASURED, BenchKey, make_row
from hf_paged_eviction_eval.store.results import Row


def decoded(variant: str, context: int | None, rounds: list[float], **numbers: Any) -> Row:
    return make_row(BenchKey(variant, context, 1024, 1), MEASURED, rounds_ms=rounds, **numbers)


def verdicts(rows: list[Row]) -> list[tuple[Any, Any]]:
    return [(goal["verdict"], goal["value"]) for goal in judge(rows)]


def test_goals() -> None:
    rows = [
        decoded("floor", None, [10.0, 20.0, 10.0]),
        decoded("paged", 2048, [30.0, 30.0, 30.0], eviction_share=0.004),
        decoded("paged", 32768, [10.2, 20.4, 30.0], eviction_share=0.02),
    ]
    for variant, time in (("full", 1000.0), ("paged", 20.0)):
        rows.append({"kind": UPDATE, "variant": variant, "rounds_us": [time, time]})
    # The ratio is that of the longest context, its median over rounds; a limit that is just reached is met.
    assert verdicts(rows) == [("met", pytest.approx(1.02)), ("met", pytest.approx(0.68)), ("missed", 0.02), ("met", 50)]
    assert {verdict for verdict, _ in verdicts([])} == {"not measured"}
    failed = [make_row(BenchKey("floor", None, 1024, 1), FAILED, "reason"), *rows[1:]]
    assert [verdict for verdict, _ in verdicts(failed)] == ["not measured", "met", "missed", "met"]

"""Goals of the project: every line is measured against `DynamicCache`, and its ratio compared with its goal."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets", reason="the extra `eval` is not installed")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts import each other from there
import goals


def test_a_verdict_per_line() -> None:
    row = {"ratios": {"tiny": {"heads": 1.15, "heads, 4 bits": 1.36, "equal budgets": 1.0}}}
    assert list(goals.verdicts(row)) == [
        "tiny: heads: 1.150, goal 1.15, met",
        "tiny: heads, 4 bits: 1.360, goal 1.35, missed",
        "tiny: equal budgets: 1.000",
    ]
    for shape, limits in goals.GOALS.items():
        assert limits.keys() <= (goals.READING if shape == "reading" else goals.STEPS).keys()


def test_steps_are_timed_at_as_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts the tokens held, so a ratio is that of the lengths: 1, or that of a longer text."""
    held: list[int] = []

    def read(timed: Any, cache: Any, tokens: int) -> float:
        timed_read(timed, cache, tokens)
        held.append(cache.stats().layers[0].held if hasattr(cache, "stats") else cache.get_seq_length())
        return float(held[-1])

    timed_read = goals.Timed.read
    monkeypatch.setattr(goals.Timed, "read", read)
    monkeypatch.setattr(goals, "LENGTHS", (512,))
    monkeypatch.setattr(goals, "TEXT", 512)
    sizes = {"layers": 2, "held": 128, "vocabulary": 64, "sizes": goals.TINY}
    monkeypatch.setitem(goals.SHAPES, "smollm2", sizes)
    ratios = goals.measure("smollm2", 1, str(tmp_path))
    whole, *shares = (f"{name} / DynamicCache, 512" for name in (goals.HEADS_4_BITS, *goals.SHARES))
    assert ratios.keys() == {*(name for name in goals.STEPS if name.startswith("heads")), whole, *shares}
    assert 0.5 < ratios["heads"] < 2  # the first layer's share
    assert ratios[whole] < 0.5
    assert all(0.9 < ratios[name] < 1.1 for name in shares)  # shares of 8,192 tokens hold all 512


def test_reading_is_timed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def read(timed: Any, cache: Any, tokens: int) -> float:
        lengths.append(tokens)
        return timed_read(timed, cache, tokens)

    timed_read = goals.Timed.read
    monkeypatch.setattr(goals.Timed, "read", read)
    monkeypatch.setattr(goals, "TEXT", 256)
    monkeypatch.setattr(goals, "CHUNK", 64)
    monkeypatch.setitem(goals.SHAPES, "reading", {"layers": 2, "held": 0, "vocabulary": 64, "sizes": goals.TINY})
    monkeypatch.setattr(goals, "READING", {name: {**one, "budget": 128} for name, one in goals.READING.items()})
    ratios = goals.measure("reading", 1, str(tmp_path))
    assert ratios.keys() == goals.READING.keys() and min(ratios.values()) > 0
    assert lengths == [64] * 4 * (1 + len(goals.READING))

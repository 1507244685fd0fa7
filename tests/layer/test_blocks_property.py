"""Random sequences of calls against the rule played with lists."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from random_calls import CALLS, SIZES, SPANS, Play, by_row, play


@settings(max_examples=80)
@given(
    rows=st.integers(1, 3),
    heads=st.sampled_from([1, 2]),
    sizes=SIZES,
    separate=st.booleans(),
    compared=st.booleans(),
    recording=st.booleans(),
    closing=st.booleans(),
    seed=st.integers(0, 10_000),
    spans=SPANS,
    calls=CALLS,
)
def test_any_calls(
    rows: int, heads: int, sizes: tuple[Any, ...], spans: list[Any], calls: list[Any], **how: Any
) -> None:
    spans = spans if rows % max(len(by_row(spans)), 1) == 0 else []
    play(Play(rows, heads, *sizes, spans=spans, **how), calls)

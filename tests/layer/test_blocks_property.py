"""Random sequences of calls against the rule played with lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from random_calls import CALLS, SIZES, SPANS, Play, by_row, play
from reference import SLOW_POLICIES

COMMON = settings(max_examples=60)

ANY_GAME = given(
    rows=st.integers(1, 3),
    heads=st.sampled_from([1, 2]),
    sizes=SIZES,
    separate=st.booleans(),
    compared=st.booleans(),
    closing=st.booleans(),
    seed=st.integers(0, 10_000),
    spans=SPANS,
    calls=CALLS,
)


def fitting(spans: list[Any], rows: int) -> list[Any]:
    return spans if rows % max(len(by_row(spans)), 1) == 0 else []


@COMMON
@ANY_GAME
def test_any_calls(
    rows: int,
    heads: int,
    sizes: tuple[Any, ...],
    separate: bool,
    compared: bool,
    closing: bool,
    seed: int,
    spans: list[Any],
    calls: list[Any],
) -> None:
    spans = fitting(spans, rows)
    play(Play(rows, heads, *sizes, separate, compared, closing=closing, seed=seed, spans=spans), calls)


@COMMON
@ANY_GAME
def test_any_calls_while_recording(
    rows: int,
    heads: int,
    sizes: tuple[Any, ...],
    separate: bool,
    compared: bool,
    closing: bool,
    seed: int,
    spans: list[Any],
    calls: list[Any],
) -> None:
    spans = fitting(spans, rows)
    play(Play(rows, heads, *sizes, separate, compared, recording=True, closing=closing, seed=seed, spans=spans), calls)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("policy", sorted(SLOW_POLICIES))
def test_every_policy(policy: str, separate: bool, seed: int) -> None:
    """Real scores instead of fractions, a fixed sequence with everything in it."""
    game = Play(3, 2, 16, 4, 4, None, separate, policy=policy, closing=seed == 0, seed=seed)
    calls: list[tuple[Any, ...]] = [("feed", 13, "left"), ("decode", 25, "none"), ("feed", 7, "none")]
    calls += [("rows", "reorder"), ("decode", 10, "none"), ("feed", 9, "any"), ("decode", 22, "none")]
    play(game, calls)

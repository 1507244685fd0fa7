"""Shares of the distance between random eviction and the oracle."""

from __future__ import annotations

import random
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from pandas import DataFrame

from benchmarks.regret import ALL_TASKS, shares


def rows_of(policy: str, scores: list[float], task: str = "passkey", budget: str = "10%") -> list[dict[str, Any]]:
    return [
        {"task": task, "length": 64, "policy": policy, "budget": budget, "id": str(index), "score": score}
        for index, score in enumerate(scores)
    ]


def one(measured: DataFrame, policy: str, task: str = "passkey") -> SimpleNamespace:
    (line,) = measured[(measured["policy"] == policy) & (measured["task"] == task)].to_dict("records")
    share = line.pop("share")
    value, error = (None, None) if share is None else (share.value, share.error)
    return SimpleNamespace(share=value, error=error, distance=line["most"], samples=line["samples"])


def test_the_ends_are_zero_and_one_and_the_middle_is_a_half() -> None:
    rows = rows_of("random", [0, 0.2, 0]) + rows_of("oracle", [1, 1, 0.8]) + rows_of("mine", [0.5, 0.6, 0.4])
    measured = shares(rows + rows_of("worse", [0, 0, 0]) + rows_of("full", [1, 1, 1], budget="full"))
    assert one(measured, "random").share == 0 and one(measured, "random").error == 0
    assert one(measured, "oracle").share == 1 and one(measured, "oracle").error == 0
    assert one(measured, "mine").share == pytest.approx(0.5)
    assert one(measured, "worse").share == pytest.approx(-0.2 / 2.6)
    assert measured["most"].tolist() == pytest.approx([2.6 / 3] * len(measured))
    assert set(measured["policy"]) == {"random", "oracle", "mine", "worse"}
    assert set(measured["samples"]) == {3}


def test_the_error_is_that_of_the_ratio_on_the_same_samples() -> None:
    chance = random.Random(0)
    low = [chance.random() * 0.3 for _ in range(40)]
    high = [0.6 + chance.random() * 0.4 for _ in low]
    own = [chance.random() for _ in low]
    estimate = one(shares(rows_of("random", low) + rows_of("oracle", high) + rows_of("mine", own)), "mine")
    estimates = []
    for _ in range(3000):
        chosen = [chance.randrange(40) for _ in low]
        gained = fmean(own[i] - low[i] for i in chosen)
        estimates.append(gained / fmean(high[i] - low[i] for i in chosen))
    assert estimate.share == pytest.approx(fmean(estimates), abs=0.02)
    assert estimate.error == pytest.approx(stdev(estimates), rel=0.1)


@pytest.mark.parametrize(
    ("first", "second", "share"), [((2, 1.0, 1.0), (6, 1.0, 0.0), 0.5), ((3, 0.9, 0.9), (3, 0.1, 0.0), 0.9)]
)
def test_tasks_count_the_same(first: tuple[int, float, float], second: tuple[int, float, float], share: float) -> None:
    """However many samples they have; those with a narrow distance count little."""
    rows = []
    for task, (count, most, gain) in (("passkey", first), ("few_shot", second)):
        rows += rows_of("random", [0.0] * count, task) + rows_of("oracle", [most] * count, task)
        rows += rows_of("mine", [gain] * count, task)
    measured = shares(rows)
    assert one(measured, "mine", ALL_TASKS).share == pytest.approx(share)
    assert one(measured, "mine").share == pytest.approx(1) and one(measured, "mine", "few_shot").share == 0
    assert one(measured, "mine", ALL_TASKS).samples == first[0] + second[0]


@pytest.mark.parametrize("oracle", [[0.0, 1.0, 0.0, 0.0], [0.0] * 4, [-1.0] * 4])
def test_where_there_is_no_distance_there_is_no_share(oracle: list[float]) -> None:
    measured = shares(rows_of("random", [0.0] * 4) + rows_of("oracle", oracle) + rows_of("mine", [1.0] * 4))
    assert one(measured, "mine").share is None and one(measured, "mine").error is None
    assert one(measured, "mine").distance == fmean(oracle)


def test_what_was_not_asked_the_same_is_left_out() -> None:
    rows = rows_of("random", [0.0] * 4) + rows_of("oracle", [1.0] * 4) + rows_of("mine", [1.0] * 3)
    assert set(shares(rows)["policy"]) == {"random", "oracle"}
    rows += rows_of("random", [0.0], "few_shot")
    assert set(shares(rows)["task"]) == {"passkey"}
    assert all(shares(few).empty for few in (rows_of("mine", [1.0]), rows_of("random", [1.0]), []))
    assert one(shares(rows_of("random", [0.5]) + rows_of("oracle", [1.0])), "oracle").error is None

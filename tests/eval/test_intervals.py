"""Means come with their standard error, and none where two numbers or one say nothing of it."""

from math import sqrt
from statistics import stdev

import pytest
from pandas import DataFrame

from hf_paged_eviction_eval.report.frame import long_frame, text_frame
from hf_paged_eviction_eval.report.means import Mean, curves, means, wilson
from hf_paged_eviction_eval.report.table import Table
from hf_paged_eviction_eval.report.tables import measure_tables, score_tables, text_table
from report_rows import cells, make_row

SCORES = [1.0, 0.5, 0.0, 0.25]


@pytest.mark.parametrize("values", [[1.0], [0.0, 1.0], [0.0, 0.5, 1.0], SCORES])
def test_two_numbers_tell_nothing(values: list[float]) -> None:
    mean = means(DataFrame({"value": values, "all": 0}), ["all"], "value")[0]
    assert mean.value == pytest.approx(sum(values) / len(values))
    assert mean.error == (pytest.approx(stdev(values) / sqrt(len(values))) if len(values) > 2 else None)


def test_of_right_and_wrong_answers_an_interval_is_shown() -> None:
    """Wilson's interval of n right answers of n begins at n / (n + 1.96 squared)."""
    assert wilson(1.0, 8) == (pytest.approx(100 * 8 / (8 + 1.96**2)), 100.0)
    assert wilson(0.0, 8) == (0.0, pytest.approx(100 - 100 * 8 / (8 + 1.96**2)))
    assert wilson(0.7, 10) == (pytest.approx(39.68, abs=0.01), pytest.approx(89.22, abs=0.01))
    frame = DataFrame({"value": [1.0] * 8, "all": 0})
    right = means(frame, ["all"], "value", 100)[0]
    assert right.interval == wilson(1.0, 8) and right.error == 0.0
    assert cells(Table("", "", DataFrame({"score": [right]}), 1)) == [["100.0 [68, 100]"]]
    partly = means(frame.assign(value=SCORES * 2), ["all"], "value", 100)[0]
    assert partly.interval is None and partly.error is not None
    assert means(frame[:2], ["all"], "value", 100)[0].interval is None
    # Two tasks of four answers are as eight.
    parts = means(frame.assign(task=[0, 1] * 4), ["all"], "value", 100, ["task"])[0]
    assert parts.interval == pytest.approx(right.interval)


def test_groups_tell_together() -> None:
    def error(*groups: list[float]) -> float | None:
        rows = [(at, value, 0) for at, values in enumerate(groups) for value in values]
        (mean,) = means(DataFrame(rows, columns=["group", "value", "all"]), ["all"], "value", within=["group"])
        assert isinstance(mean, Mean)
        return mean.error

    assert error([0.0, 1.0]) is None and error([0.0, 1.0], [1.0]) is None
    assert error([0.0, 1.0], [0.0, 1.0]) == pytest.approx(sqrt(0.5) / 2)


@pytest.mark.parametrize("count", [2, 3])
def test_every_table_of_means(count: int) -> None:
    rows = []
    for at in range(count):
        for policy, budget in (("full", "full"), ("keydiff", "64")):
            more = {"agreement": {"identical": SCORES[at], "kl": 0.5 * at}, "ended": at % 2 == 0, "repeated": 0.1 * at}
            more |= {"new_tokens": 4 + at, "score": SCORES[at]}
            rows.append(make_row("passkey", (policy, budget), at) | more | {"length": 64})
    frame = long_frame(rows)
    for table in (*score_tables(frame), *measure_tables(frame)):
        shown = [text for line in cells(table) for text in line]
        assert any("±" in text for text in shown) == (count > 2), table.name


@pytest.mark.parametrize("texts", [2, 3])
def test_perplexity_over_texts(texts: int) -> None:
    """The same text again and again has no error; different ones have that of a ratio of sums."""
    same = [
        {
            "text": f"{at}",
            "policy": "keydiff",
            "budget": "64",
            "budget_tokens": 64,
            "loss": [3.0],
            "count": [2],
            "tokens": 99,
        }
        for at in range(texts)
    ]
    (curve,) = curves(text_frame(same))["perplexity"]
    assert curve.error == (pytest.approx(0.0) if texts > 2 else None)
    by_metric = curves(text_frame([row | {"loss": [3.0 + at]} for at, row in enumerate(same)]))
    (curve,) = by_metric["perplexity"]
    losses = [(3.0 + at) / 2 for at in range(texts)]
    if texts > 2:
        assert curve.error == pytest.approx(curve.value * stdev(losses) / sqrt(texts))
    (table,) = text_table(by_metric)
    assert ("±" in cells(table)[0][1]) == (texts > 2)

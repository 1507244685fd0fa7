"""Rounds that cost what they may, and decisions that follow from the rows."""

from __future__ import annotations

from itertools import product

import pytest

from hf_paged_eviction_eval.recommend.halving import Round, cost, plan, survivors


@pytest.mark.parametrize(("candidates", "passages"), [*product((1, 2, 7, 40, 300), (1, 9, 20, 40, 200))])
@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_rounds_cost_no_more_than_their_share(candidates: int, passages: int, share: float) -> None:
    rounds = plan(candidates, passages, share)
    assert rounds[0].candidates == candidates
    assert [each.candidates for each in rounds] == sorted((each.candidates for each in rounds), reverse=True)
    read = [each.passages for each in rounds]
    assert read == sorted(read) and read[0] >= 1 and read[-1] <= passages
    allowed = share * cost([Round(candidates, passages)])
    if cost([Round(candidates, 1)]) <= allowed:
        assert cost(rounds) <= allowed
        assert candidates < 40 or cost(rounds) > 0.7 * allowed, "what may be read is read"
    else:
        assert read[0] == 1


def test_everything_is_read_where_everything_may_be() -> None:
    assert plan(7, 9, 1.0) == (Round(7, 9),)


def test_the_lowest_mean_survives() -> None:
    divergences = {"late": [3.0, 1.0], "best": [1.0, 1.0], "broken": [0.0, float("nan")], "good": [1.0, 2.0]}
    assert survivors(divergences, 2) == ["best", "good"]
    assert survivors(divergences, 9) == ["best", "good", "late", "broken"]
    assert survivors({}, 2) == []

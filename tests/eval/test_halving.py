"""Rounds that cost what they may, and decisions that follow from the rows."""

from __future__ import annotations

import io
from itertools import product
from typing import Any

import pytest
from rich.console import Console

from hf_paged_eviction_eval.recommend.halving import Round, cost, plan, survivors
from hf_paged_eviction_eval.recommend.ranking import rank
from hf_paged_eviction_eval.recommend.show import table


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


def test_no_candidate_is_dropped_after_one_passage_where_more_may_be_read() -> None:
    for candidates, passages in ((40, 40), (12, 30), (200, 80)):
        rounds = plan(candidates, passages, 0.1)
        assert rounds[0].passages >= 2 and (len(rounds) > 1 or candidates == 12)
    assert plan(40, 9, 0.1)[0].passages == 1


def test_equal_divergences_are_no_victory() -> None:
    def row(candidate: str, passage: int, divergence: float) -> dict[str, Any]:
        fields = {"held": 8, "bytes": 8, "host_bytes": 0, "step_ms": 1.0, "failed": ""}
        both = {"reading": divergence, "answering": divergence}
        return {"size": "8", "candidate": candidate, "passage": str(passage), **fields, **both}

    values = {"best": [1.0, 1.0, 1.2], "near": [1.1, 0.9, 1.3], "far": [2.0, 2.1, 2.0], "once": [1.0]}
    rows = {(name, at): row(name, at, value) for name, read in values.items() for at, value in enumerate(read)}
    found = {each.candidate: each for each in rank(rows, {"8": ["best", "near"]}, "both")}
    assert {name for name, each in found.items() if each.tied} == {"best", "near"}
    assert found["once"].error is None and found["far"].error == pytest.approx(0.0333, abs=1e-3)
    shown = Console(width=100, file=io.StringIO())
    shown.print(table("8", list(found.values()), list(found.values())))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "1.067 ± 0.067" in text and "no difference seen between best; near" in text


def test_everything_is_read_where_everything_may_be() -> None:
    assert plan(7, 9, 1.0) == (Round(7, 9),)


def test_the_lowest_mean_survives() -> None:
    divergences = {"late": [3.0, 1.0], "best": [1.0, 1.0], "broken": [0.0, float("nan")], "good": [1.0, 2.0]}
    assert survivors(divergences, 2) == ["best", "good"]
    assert survivors(divergences, 9) == ["best", "good", "late", "broken"]
    assert survivors({}, 2) == []

"""How far a policy gets on the way from random eviction to the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pandas import DataFrame

from hf_paged_eviction_eval.caches.budgets import FULL, ORACLE
from hf_paged_eviction_eval.store.results import Row
from hf_paged_eviction_eval.tables import means

RANDOM = "random"
ALL_TASKS = "all tasks"


@dataclass(frozen=True)
class Share:
    """Where a policy stands between random eviction (0) and the oracle (1), at one budget, on the same samples.

    Attributes:
        task: or "all tasks", each of which counts the same.
        distance: mean score of the oracle minus that of random eviction.
        share: below 0 is worse than random, above 1 better than the oracle; None where the oracle is not better than
            random by more than twice the standard error of that distance.
        error: standard error of `share` (that of a ratio of two means over the same samples).
        samples: number of questions.
    """

    task: str
    length: int | None
    policy: str
    budget: str
    distance: float
    share: float | None
    error: float | None
    samples: int


def shares(rows: Iterable[Row]) -> list[Share]:
    """One entry per task (and all of them), length, budget and policy that has been asked all that random was.

    Args:
        rows: of one setting, with those of the policies "random" and "oracle" among them.
    """
    compressed = [row for row in rows if row["policy"] != FULL]
    frame = DataFrame([{name: row[name] for name in (*_PLACE, "id", "policy", "score")} for row in compressed])
    if frame.empty:
        return []
    floor, most = (_of(frame, policy, name) for policy, name in ((RANDOM, "low"), (ORACLE, "most")))
    pairs = frame.merge(floor, on=[*_PLACE, "id"]).merge(most, on=[*_PLACE, "id"])
    pairs["score"], pairs["most"] = pairs["score"] - pairs["low"], pairs["most"] - pairs["low"]
    pairs = pairs.join(floor.groupby(_PLACE).size().rename("asked"), on=_PLACE)
    pairs = pairs[pairs.groupby([*_PLACE, "policy"])["id"].transform("size") == pairs["asked"]]
    pairs = pairs.join(floor.groupby(_PLACE[:2])["task"].nunique().rename("tasks"), on=_PLACE[:2])
    answered = pairs.groupby([*_PLACE[:2], "policy"])["task"].transform("nunique")
    every = pairs[(answered == pairs["tasks"]) & (pairs["tasks"] > 1)].assign(joint=ALL_TASKS)
    all_shares = []
    for part, name, within in ((pairs, "task", ()), (every, "joint", ("task",))):
        for (task, *place), one in means.shares(part, [name, "length", "policy", "budget"], within).iterrows():
            share, error = (one["share"].value, one["share"].error) if one["share"] else (None, None)
            all_shares.append(Share(task, *place, one["most"], share, error, one["samples"]))
    return all_shares


_PLACE = ["length", "budget", "task"]


def _of(frame: DataFrame, policy: str, name: str) -> DataFrame:
    """Scores of a policy by sample, under another name."""
    return frame[frame["policy"] == policy].drop(columns="policy").rename(columns={"score": name})

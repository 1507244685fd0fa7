"""How far a policy gets on the way from random eviction to the oracle."""

from __future__ import annotations

from collections.abc import Iterable

from pandas import DataFrame, concat

from hf_paged_eviction_eval.caches.budgets import FULL, ORACLE
from hf_paged_eviction_eval.store.results import Row
from hf_paged_eviction_eval.tables import means

RANDOM = "random"
ALL_TASKS = "all tasks"
_PLACE = ["length", "budget", "task"]
_LINE = ["task", "length", "policy", "budget"]


def shares(rows: Iterable[Row]) -> DataFrame:
    """Where policies stand between random eviction (0) and the oracle (1), on the same samples.

    Args:
        rows: of one setting, with those of the policies "random" and "oracle" among them.

    Returns:
        A line per task, length, policy and budget that has been asked all that random was; the task "all tasks" counts
        each the same. `most`: mean score of the oracle minus that of random eviction. `share`: a `Mean`, below 0 is
        worse than random; None where `most` is not above zero by more than twice its standard error. `samples`:
        number of questions.
    """
    compressed = [row for row in rows if row["policy"] != FULL]
    frame = DataFrame(compressed, columns=[*_PLACE, "id", "policy", "score"])
    floor, most = (_of(frame, policy, name) for policy, name in ((RANDOM, "low"), (ORACLE, "most")))
    pairs = frame.merge(floor, on=[*_PLACE, "id"]).merge(most, on=[*_PLACE, "id"])
    if pairs.empty:
        return DataFrame(columns=[*_LINE, "most", "share", "samples"])
    pairs["score"], pairs["most"] = pairs["score"] - pairs["low"], pairs["most"] - pairs["low"]
    pairs = pairs.join(floor.groupby(_PLACE).size().rename("asked"), on=_PLACE)
    pairs = pairs[pairs.groupby([*_PLACE, "policy"])["id"].transform("size") == pairs["asked"]]
    pairs = pairs.join(floor.groupby(_PLACE[:2])["task"].nunique().rename("tasks"), on=_PLACE[:2])
    answered = pairs.groupby([*_PLACE[:2], "policy"])["task"].transform("nunique")
    every = pairs[(answered == pairs["tasks"]) & (pairs["tasks"] > 1)].assign(joint=ALL_TASKS)
    parts = [means.shares(pairs, _LINE)]
    if len(every):
        parts.append(means.shares(every, ["joint", *_LINE[1:]], ["task"]).rename_axis(_LINE))
    return concat(parts).reset_index()


def _of(frame: DataFrame, policy: str, name: str) -> DataFrame:
    """Scores of a policy by sample, under another name."""
    return frame[frame["policy"] == policy].drop(columns="policy").rename(columns={"score": name})

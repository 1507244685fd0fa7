"""How far a policy gets on the way from random eviction to the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_paged_eviction_eval.caches.budgets import FULL, ORACLE
from hf_paged_eviction_eval.store.results import Row
from hf_paged_eviction_eval.store.summaries.summary import share_of

RANDOM = "random"
ALL_TASKS = "all tasks"

#: Scores by sample.
Scores = Mapping[str, float]


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
    scores: dict[tuple[int | None, str], dict[str, dict[str, dict[str, float]]]] = {}
    for row in rows:
        if row["policy"] != FULL:
            tasks = scores.setdefault((row["length"], row["budget"]), {}).setdefault(row["policy"], {})
            tasks.setdefault(row["task"], {})[row["id"]] = row["score"]
    found = []
    for (length, budget), policies in scores.items():
        floor, ceiling = policies.get(RANDOM, {}), policies.get(ORACLE, {})
        for policy, own in policies.items():
            triples = {task: _paired(own.get(task, {}), floor[task], ceiling.get(task, {})) for task in floor}
            known = {task: triple for task, triple in triples.items() if triple}
            groups = {task: {task: triple} for task, triple in known.items()}
            if len(known) == len(floor) > 1:
                groups[ALL_TASKS] = known
            found += [Share(task, length, policy, budget, *share_of(group)) for task, group in groups.items()]
    return found


def _paired(own: Scores, floor: Scores, ceiling: Scores) -> list[tuple[float, float]]:
    """What the policy and what the oracle gains over random, by sample; empty where samples are missing."""
    if not floor.keys() <= own.keys() & ceiling.keys():
        return []
    return [(own[name] - low, ceiling[name] - low) for name, low in floor.items()]

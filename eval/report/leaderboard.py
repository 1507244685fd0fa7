"""One number per policy and budget, over all tasks: what a paper or a README shows first."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame, MultiIndex, Series

from hf_paged_eviction.naming.sizes import readable_bytes

from ..caches.budgets import FULL
from ..tables.frame import whole
from ..tables.means import means, shares
from ..tables.table import FULL_CACHE, Table
from .runs import LINE, PLACE, Run, complete, frame_of


def standings(*runs: Run) -> DataFrame:
    """Where policies at budgets stand, over all tasks and lengths, each counting the same.

    Returns:
        A line per run, budget and policy that has answered every task of its run, smaller budgets first and the full
        cache at the end. `mean`: score in percent; `kept`: percent of the full cache's score over the questions that
        both answered, None without a full cache and where that scores nothing; `tokens`: held per layer and row, None
        for the full cache; `bytes`: of keys and values per row after the answer on the model's device; `host`: those
        beside them in host memory, where there are any.
    """
    frame = complete(frame_of(runs), PLACE)
    groups = frame.groupby(list(LINE), sort=False)
    table = DataFrame({"mean": means(frame, LINE, "score", 100, PLACE)})
    full = frame[frame["policy"] == FULL].rename(columns={"score": "most"})[["run", *PLACE, "id", "most"]]
    pairs = frame[frame["policy"] != FULL].merge(full, on=["run", *PLACE, "id"])
    share_of_full = shares(complete(pairs, PLACE, among=frame).eval("score = 100 * score"), LINE, PLACE)["share"]
    table["kept"] = Series([share_of_full.get(line) for line in table.index], table.index, dtype=object)
    table["tokens"] = Series(whole(groups["budget_tokens"].mean()), table.index, dtype=object)
    table["bytes"] = groups["kv_bytes"].mean()
    table["host"] = groups["host_bytes"].mean().where(lambda size: size > 0)
    labels = [run.label for run in runs]
    order = sorted(table.index, key=lambda line: (labels.index(line[0]), line[2] == FULL, table["tokens"][line] or 0))
    return table.loc[order]


def _over(runs: Sequence[Run]) -> str:
    sizes = {len(run.tasks) for run in runs}
    return f"mean of {' or '.join(map(str, sorted(sizes)))} task{'s' * (sizes != {1})}"


def leaderboard(runs: Sequence[Run]) -> Table | None:
    """Policies by budgets: mean score and its standard error; the full cache repeated in every column."""
    table = standings(*runs)
    rest = table[table.index.get_level_values("policy") != FULL]
    budgets = rest["tokens"].groupby("budget", sort=False).max().sort_values(kind="stable").index
    if not len(budgets):
        return None
    several, lines = len(runs) > 1, {}
    for label, mine in table.groupby("run", sort=False):
        scores = mine["mean"].droplevel("run")
        values = scores.map(float).groupby("policy", sort=False).mean()
        for policy in sorted(values.index, key=lambda policy: (policy != FULL, -values[policy])):
            row = [scores.get((FULL if policy == FULL else budget, policy)) for budget in budgets]
            lines[label, FULL_CACHE if policy == FULL else policy] = row
    columns = [budget if several else _with_bytes(budget, rest) for budget in budgets]
    index = MultiIndex.from_tuples(lines, names=["run", "policy"])
    board = DataFrame(list(lines.values()), index if several else index.droplevel("run"), columns, dtype=object)
    note = (
        f"Score in %, {_over(runs)}, each counting the same, ± its standard error over the questions. "
        + ("" if several else "Beside a budget: bytes that a row holds after its answer, on the model's device. ")
        + ("What lies in host memory besides does not count as bytes held. " if table["host"].any() else "")
        + "Darker: nearer to the full cache."
    )
    return Table("leaderboard", "Leaderboard: policy by budget", board, 1, note, columns)


def _with_bytes(budget: str, table: DataFrame) -> str:
    """The budget, and what rows hold at it, from the least to the most of any policy."""
    sizes = table.xs(budget, level="budget")["bytes"].dropna()
    shown = dict.fromkeys(readable_bytes(round(size)) for size in sizes.agg(["min", "max"]).dropna())
    return f"{budget} ({' to '.join(shown)})" if shown else budget

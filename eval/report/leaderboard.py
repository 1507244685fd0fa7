"""One number per policy and budget, over all tasks: what a paper or a README shows first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hf_paged_eviction.naming.sizes import readable_bytes

from ..caches.budgets import FULL
from ..store.results import Row
from ..store.summaries.summary import NOTHING_EVICTED, all_held, held_tokens, mean_of, mean_of_means, share_of
from ..store.summaries.table import Column, Spread, Table, Value, find_best, find_shades
from .measures import MIB
from .runs import Run, Variant
from .scores import Line, lines_of, table_of_lines


@dataclass(frozen=True)
class Standing:
    """Where a policy at a budget stands, over all tasks and lengths, each counting the same.

    Attributes:
        mean: score in percent.
        kept: percent of the full cache's score, over the questions that both answered; None without a full cache, and
            where that scores nothing.
        tokens: held per layer and row in the mean; None for the full cache.
        bytes: of keys and values per row after the answer, on the model's device.
        host: beside them in host memory; None where there are none.
        all_held: nothing was evicted.
    """

    mean: Spread
    kept: Spread | None
    tokens: int | None
    bytes: float | None
    host: float | None
    all_held: bool


def standing(run: Run, variant: Variant) -> Standing | None:
    """None unless every task of the run has an answer."""
    places = [(task, length) for task in run.tasks for length in run.lengths(task)]
    groups = [run.of(*place, variant) for place in places]
    if not groups or not all(groups):
        return None
    scores = [[float(row["score"]) for row in rows] for rows in groups]
    mean = mean_of_means(scores, 100)
    rows = [row for group in groups for row in group]
    costs = [row["efficiency"] for row in rows if row.get("efficiency")]
    held, host = (mean_of(cost.get(name) for cost in costs) for name in ("kv_bytes", "host_bytes"))
    tokens = held_tokens(row["budget_tokens"] for row in rows)
    return Standing(mean, _kept(run, variant), tokens, held, host or None, all_held(rows))


def _kept(run: Run, variant: Variant) -> Spread | None:
    full = next((other for other in run.variants if other[0] == FULL), None)
    if full is None or variant == full:
        return None
    pairs: dict[tuple[str, int | None], list[tuple[float, float]]] = {}
    for task in run.tasks:
        for length in run.lengths(task):
            most = {row["id"]: row["score"] for row in run.of(task, length, full)}
            own = run.of(task, length, variant)
            pairs[task, length] = [(row["score"], most[row["id"]]) for row in own if row["id"] in most]
    if not all(pairs.values()):
        return None
    _, share, error, _ = share_of(pairs)
    return None if share is None else Spread(100 * share, None if error is None else 100 * error)


def standings(run: Run) -> dict[Variant, Standing]:
    """By policy and budget, smaller budgets first, the full cache at the end."""
    found = {variant: one for variant in run.variants if (one := standing(run, variant))}
    return dict(sorted(found.items(), key=lambda item: (item[0][0] == FULL, item[1].tokens or 0)))


def _over(runs: Sequence[Run]) -> str:
    sizes = {len(run.tasks) for run in runs}
    return f"mean of {' or '.join(map(str, sorted(sizes)))} task{'s' * (sizes != {1})}"


def leaderboard(runs: Sequence[Run]) -> Table | None:
    """Policies by budgets: mean score and its standard error; the full cache repeated in every column."""
    every = {run.label: standings(run) for run in runs}
    budgets = _budgets(every.values())
    if not budgets:
        return None
    several = len(runs) > 1
    names: list[tuple[str, str]] = []
    rows: list[tuple[Value, ...]] = []
    marked: set[tuple[int, int]] = set()
    for label, found in every.items():
        for policy in _best_first(found):
            own = [found.get((policy, FULL if policy == FULL else budget)) for budget in budgets]
            names.append((label, policy))
            title = "full cache" if policy == FULL else policy
            marked |= {(len(rows), 1 + several + at) for at, one in enumerate(own) if one and one.all_held}
            rows.append((*([label] * several), title, *(one.mean if one else None for one in own)))
    columns = [Column("run")] * several + [Column("policy")]
    columns += [Column(_with_bytes(budget, every), 1) for budget in budgets]
    picked = range(1 + several, len(columns))
    best = find_best(rows, columns, [None if policy == FULL else label for label, policy in names], picked)
    shades = find_shades(rows, [label for label, _ in names], [policy == FULL for _, policy in names], picked)
    breaks = frozenset(at for at in range(1, len(names)) if names[at][0] != names[at - 1][0])
    note = (
        f"Score in %, {_over(runs)}, each counting the same, ± its standard error over the questions. "
        + ("" if several else "Beside a budget: bytes that a row holds after its answer, on the model's device. ")
        + ("What lies in host memory besides does not count as bytes held. " if _any_host(every) else "")
        + "Darker: nearer to the full cache."
        + (f" {NOTHING_EVICTED}" if marked else "")
    )
    title = "Leaderboard: policy by budget"
    return Table(
        "leaderboard", title, tuple(columns), tuple(rows), note, best, breaks, 1, several, shades, frozenset(marked)
    )


def _best_first(found: Mapping[Variant, Standing]) -> list[str]:
    """The full cache, then policies by their mean over the budgets."""
    means = {policy: [one.mean for (other, _), one in found.items() if other == policy] for policy, _ in found}
    return sorted(means, key=lambda policy: (policy != FULL, -fmean(means[policy])))


def _budgets(every: Iterable[Mapping[Variant, Standing]]) -> list[str]:
    sizes: dict[str, int] = {}
    for one in every:
        for (policy, budget), place in one.items():
            if policy != FULL:
                sizes[budget] = max(sizes.get(budget, 0), place.tokens or 0)
    return sorted(sizes, key=lambda budget: sizes[budget])


def _with_bytes(budget: str, every: dict[str, dict[Variant, Standing]]) -> str:
    """The budget and, where one run shows it, what rows hold at it, from the least to the most of any policy."""
    if len(every) > 1:
        return budget
    held = [one.bytes for found in every.values() for variant, one in found.items() if variant[1] == budget]
    known = [size for size in held if size is not None]
    if not known:
        return budget
    sizes = dict.fromkeys(readable_bytes(round(size)) for size in (min(known), max(known)))
    return f"{budget} ({' to '.join(sizes)})"


def _any_host(every: Mapping[str, Mapping[Variant, Standing]]) -> bool:
    return any(one.host for found in every.values() for one in found.values())


def standing_table(runs: Sequence[Run]) -> Table | None:
    """Every number behind the leaderboard, one row per policy and budget."""
    every = {run.label: standings(run) for run in runs}
    host = [Column("in host memory (MiB per row)", 3)] if _any_host(every) else []
    columns = [
        Column("mean score (%)", 1),
        Column("of the full cache's score (%)", 1),
        Column("tokens held per layer"),
        Column("KV held (MiB per row)", 3),
        Column("of the full cache's bytes (%)", 1),
        *host,
    ]

    def values(line: Line) -> list[Value]:
        standing_of = every[line.run.label]
        found = standing_of.get(line.variant)
        full = next((one for (policy, _), one in standing_of.items() if policy == FULL), None)
        if found is None:
            return []
        share = 100 * found.bytes / full.bytes if found.bytes and full and full.bytes and line.group else None
        held, besides = (None if size is None else size / MIB for size in (found.bytes, found.host))
        return [found.mean, found.kept, found.tokens, held, share, *([besides] if host else [])]

    lines = [line for line in lines_of(runs) if line.run.rows]
    title = f"Every policy and budget, {_over(runs)}"

    def behind(line: Line, at: int) -> list[Row]:
        return line.run.answers(line.variant) if at in (0, 1) else []

    return table_of_lines("standings", title, lines, columns, values, best=[0, 1], behind=behind) if lines else None


def model_table(runs: Sequence[Run]) -> Table | None:
    """Several runs beside each other: what every policy keeps of the full cache's score in each."""
    every = [standings(run) for run in runs]
    variants = [variant for variant in dict.fromkeys(name for found in every for name in found) if variant[0] != FULL]
    rows: list[tuple[Value, ...]] = []
    marked: set[tuple[int, int]] = set()
    for policy, budget in variants:
        here = [found.get((policy, budget)) for found in every]
        kept = [one.kept if one else None for one in here]
        known = [value for value in kept if value is not None]
        if known:
            mean = fmean(known) if len(known) == len(kept) else None
            held = [at for at, one in enumerate(here) if one and one.all_held and kept[at] is not None]
            marked |= {(len(rows), 2 + at) for at in held}
            rows.append((budget, policy, *kept, mean))
    if len(runs) < 2 or not rows:
        return None
    columns = (Column("budget"), Column("policy"), *(Column(run.label, 1) for run in runs), Column("mean", 1))
    budgets = [row[0] for row in rows]
    picked = range(2, len(columns))
    best = find_best(rows, columns, budgets, picked)
    shades = {
        (at, column): min(max(value / 100, 0.0), 1.0) ** 2
        for at, row in enumerate(rows)
        for column, value in enumerate(row)
        if isinstance(value, float)
    }
    breaks = frozenset(at for at in range(1, len(rows)) if budgets[at] != budgets[at - 1])
    note = (
        "In % of the full cache's mean score of the same run, over the questions that both answered, ± standard error."
        + (f" {NOTHING_EVICTED}" if marked else "")
    )
    title = "Runs beside each other: share of the full cache's score"
    return Table("models", title, columns, tuple(rows), note, best, breaks, 2, False, shades, frozenset(marked))

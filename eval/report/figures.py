"""The report's plots: frames of panels, policies and points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator
from pandas import DataFrame, Series, concat

from ..caches.budgets import FULL
from ..data.longbench.tasks import TASKS
from ..tables.longbench import BUCKETS
from ..tables.means import cells_of, means
from ..tables.plot import (
    TOKEN_AXIS,
    accuracy_by_task,
    accuracy_panels,
    budget_axis,
    in_each,
    line_panels,
    mean_cells,
    perplexity_by_position,
    score_axis,
)
from .measures import agreement, costs
from .runs import PLACE, Run, complete, prompts_of
from .scores import bucket_means

WIDE = (4.2, 3.2)
_LINE = ["policy", "budget"]


@dataclass(frozen=True)
class Plot:
    """A figure of matplotlib under the name of its files, or the picture that was made of it.

    Attributes:
        caption: what it shows, also for those who cannot see it.
        panels: how many of the picture stand side by side.
        source: its address: the picture itself.
    """

    name: str
    caption: str
    figure: Any
    panels: int = 1
    source: str = ""


def overview(runs: Sequence[Run]) -> Plot | None:
    """Mean score over the budget: a panel per run and length of prompts, or per run where that would be many."""
    whole = sum(len(run.lengths) for run in runs) > 6
    frames = [(run.label, complete(run.frame, PLACE)) for run in runs]
    panels = [mean_cells(frame.assign(length=0) if whole else frame, run) for run, frame in frames if len(frame)]
    if not panels:
        return None
    cells = concat(panels, ignore_index=True)
    caption = "Mean score over the tasks, each counting the same, over the budget; the full cache as a line."
    size = WIDE if cells["panel"].nunique() > 1 else None
    return Plot("overview", caption, accuracy_panels(cells, size=size))


def score_over_length(run: Run) -> Plot | None:
    """Decay: mean score of the tasks that have every length, against the length; one panel per budget."""
    lengths = [length for length in run.lengths if length]
    tasks = [task for task in run.tasks if {(task, length) for length in lengths} <= set(run.places)]
    if len(lengths) < 2 or not tasks:
        return None
    frame = run.frame[run.frame["task"].isin(tasks) & run.frame["length"].isin(lengths)]
    scores = means(complete(frame, ["task"], "length"), [*_LINE, "length"], "score", 100, ["task"])
    caption = f"Score over the length of the prompt, mean of {_tasks(tasks)}; one panel per budget."
    places = {length: str(length) for length in lengths}
    return Plot("score_over_length", caption, _decay(run, scores, "length of the prompt (tokens)", places))


def score_over_buckets(run: Run) -> Plot | None:
    """The same over the buckets of LongBench-E."""
    tasks = [task for task in run.tasks if task in TASKS and TASKS[task].is_e]
    if not tasks:
        return None
    scores = bucket_means(run.frame, _LINE)
    scores.index = scores.index.set_levels([BUCKETS.index(name) for name in scores.index.levels[-1]], level=-1)
    caption = f"LongBench-E: score over the length of the record, mean of {_tasks(tasks)}; one panel per budget."
    places = dict(enumerate(BUCKETS))
    return Plot("score_over_buckets", caption, _decay(run, scores, "length of the record (words)", places))


def _tasks(tasks: Sequence[str]) -> str:
    return tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"


def _decay(run: Run, scores: Series, x_name: str, places: dict[int, str], y_name: str = "score in %") -> Any:
    """A panel per budget of numbers by policy, budget and place; the full cache in each."""
    budgets = list(dict.fromkeys(budget for policy, budget in run.variants if policy != FULL)) or [FULL]
    points = scores.map(float).rename_axis([*_LINE, "x"]).rename("y").reset_index()

    def x_axis(axes: Any, _: Sequence[float]) -> None:
        if len(places) > 1 and max(places) >= 4 * min(places) > 0:
            axes.set_xscale("log", base=2)
        axes.set_xticks([*places], [*places.values()], rotation=45 if len(places) > 6 else 0, fontsize=9)
        axes.minorticks_off()

    points = in_each(points, {budget: f"budget {budget}" for budget in budgets})
    return line_panels(points, x_name, y_name, x_axis, score_axis, size=WIDE, share_y=True)


def score_plots(run: Run) -> Iterator[Plot]:
    """Score over the budget, a plot for each kind of tasks."""
    cells = cells_of(run.frame)
    for suite, mine in cells.groupby(cells["task"].map(_suite), sort=False):
        caption = "Score over the budget, per task; the full cache as a line."
        yield Plot(f"score_over_budget_{suite}", caption, accuracy_by_task(mine))


def _suite(name: str) -> str:
    task = TASKS.get(name)
    return "others" if task is None else "longbench_e" if task.is_e else "longbench"


def text_plots(run: Run) -> Iterator[Plot]:
    """Perplexity over the position."""
    if run.texts:
        window = run.sources[0].meta.get("window") if run.sources else None
        length = max(row["length"] for row in run.texts)
        figure = perplexity_by_position(run.curves, length, window if isinstance(window, int) else None)
        yield Plot("perplexity", "Perplexity over the position in the text; one panel per budget.", figure)


def efficiency_plot(run: Run, length: int) -> Plot | None:
    """Latency and memory against the budget; a panel for everything that was measured."""
    frame = run.frame[run.frame["length"] == length]
    names = {
        "prefill (s)": "prefill (s per batch)",
        "time per token (ms)": "time per token (ms)",
        "tokens/s": "tokens per second",
        "in the cache (%)": "inside the cache (% of a step)",
        "KV held (MiB per row)": "KV held (MiB per row)",
        "peak memory (MiB)": "peak memory (MiB)",
    }
    caption = f"Latency and memory over the budget, {prompts_of([run], length)}."
    return _over_budget(frame, f"efficiency_{length or 'own'}", caption, costs(frame, _LINE), names)


def agreement_plot(run: Run) -> Plot | None:
    """Agreement with the full cache against the budget."""
    frame = run.frame[run.frame["policy"] != FULL]
    names = {"identical tokens (%)": "identical tokens (%)", "KL (nats)": "KL divergence (nats per token)"}
    caption = "Agreement with the full cache over the budget, all tasks."
    return _over_budget(frame, "agreement", caption, agreement(frame, _LINE), names)


def _over_budget(frame: DataFrame, plot: str, caption: str, numbers: DataFrame, names: dict[str, str]) -> Plot | None:
    """A panel per column that has a number."""
    places = frame.groupby(_LINE)["budget_tokens"].mean().round().rename("x")
    shown = numbers.rename(columns=names).reset_index().melt(_LINE, [*names.values()], "panel", "y")
    points = shown.dropna(subset=["y"]).join(places, on=_LINE)
    if points.empty:
        return None
    points["y"] = points["y"].map(float)

    def from_zero(axes: Any, _: Sequence[float]) -> None:
        axes.set_ylim(0, (axes.get_ylim()[1] or 1) * 1.05)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))

    columns = min(3, points["panel"].nunique())
    return Plot(plot, caption, line_panels(points, TOKEN_AXIS, "", budget_axis, from_zero, columns, WIDE))

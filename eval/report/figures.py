"""The report's plots: frames of panels, policies and points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import Any

from matplotlib import colormaps
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame, Series

from ..caches.budgets import FULL
from ..data.longbench.tasks import TASKS
from ..tables.longbench import BUCKETS
from ..tables.means import cells_of, curves, means
from ..tables.plot import (
    TOKEN_AXIS,
    accuracy_by_task,
    accuracy_panels,
    budget_axis,
    line_panels,
    perplexity_by_position,
    score_axis,
)
from ..tables.plot_style import COLUMNS, make_panels, named, wrapped
from .measures import agreement, costs, hits
from .runs import PLACE, Run, Variant, prompts_of
from .scores import bucket_means

WIDE = (4.2, 3.2)
#: Inches of a heat map, all panels of a line together.
HEAT_WIDTH = 12.0
_LINE = ["policy", "budget"]


@dataclass(frozen=True)
class Plot:
    """A figure of matplotlib under the name of its files.

    Attributes:
        caption: what it shows, also for those who cannot see it.
        panels: how many stand side by side.
    """

    name: str
    caption: str
    figure: Any
    panels: int


def overview(runs: Sequence[Run]) -> Plot | None:
    """Mean score over the budget: a panel per run and length of prompts, or per run where that would be many."""
    frames = [(run, length, run.frame[run.frame["length"] == length]) for run in runs for length in run.lengths]
    if len(frames) > 6:
        frames = [(run, 0, run.frame) for run in runs if run.rows]
    groups = []
    for run, length, frame in frames:
        tasks = frame["task"].nunique()
        size = f"{length} tokens, " if length else ""
        title = f"{size}mean of {tasks} task{'s' * (tasks != 1)}"
        cells = cells_of(_complete(frame, list(PLACE)).assign(shown=length), ["shown", *_LINE], PLACE)
        if len(cells):
            cells = cells.rename(columns={"shown": "length"})
            groups.append((f"{run.label}\n{title}" if len(runs) > 1 else title, cells))
    if not groups:
        return None
    caption = "Mean score over the tasks, each counting the same, over the budget; the full cache as a line."
    return Plot("overview", caption, *accuracy_panels(groups, size=WIDE if len(groups) > 1 else None))


def _complete(frame: DataFrame, of: Sequence[str], by: Sequence[str] = ()) -> DataFrame:
    """Rows of the policies and budgets that have some for all values of `of`, within each group of `by`."""
    columns = [*_LINE, *by]
    counts = frame.drop_duplicates([*columns, *of]).groupby(columns).size()
    wanted = len(frame.drop_duplicates(list(of)))
    return frame.join((counts == wanted).rename("complete"), on=columns).query("complete")


def score_over_length(run: Run) -> Plot | None:
    """Decay: mean score of the tasks that have every length, against the length; one panel per budget."""
    lengths = [length for length in run.lengths if length]
    tasks = [task for task in run.tasks if set(lengths) <= set(run.lengths_of(task))]
    if len(lengths) < 2 or not tasks:
        return None
    frame = run.frame[run.frame["task"].isin(tasks) & run.frame["length"].isin(lengths)]
    scores = means(_complete(frame, ["task"], ["length"]), [*_LINE, "length"], "score", 100, ["task"])
    caption = f"Score over the length of the prompt, mean of {_tasks(tasks)}; one panel per budget."
    axis = "length of the prompt (tokens)"
    return Plot(
        "score_over_length", caption, *_decay(run, scores, axis, dict(zip(lengths, map(str, lengths), strict=True)))
    )


def score_over_buckets(run: Run) -> Plot | None:
    """The same over the buckets of LongBench-E."""
    tasks = [task for task in run.tasks if task in TASKS and TASKS[task].is_e]
    if not tasks:
        return None
    scores = bucket_means(run.frame, [*_LINE])
    scores.index = scores.index.set_levels([BUCKETS.index(name) for name in scores.index.levels[-1]], level=-1)
    caption = f"LongBench-E: score over the length of the record, mean of {_tasks(tasks)}; one panel per budget."
    return Plot(
        "score_over_buckets", caption, *_decay(run, scores, "length of the record (words)", dict(enumerate(BUCKETS)))
    )


def hits_over_layers(run: Run) -> Plot | None:
    """Hit rate by layer; one panel per budget."""
    layer_hits = hits(run.frame, _LINE)
    layers = sorted(layer_hits["layer"].unique())
    if len(layers) < 2:
        return None
    rates = layer_hits.groupby([*_LINE, "layer"], sort=False)["rate"].mean()
    full = {(FULL, budget, layer): 100.0 for policy, budget in run.variants if policy == FULL for layer in layers}
    rates = Series({**full, **rates[rates.index.get_level_values("policy") != FULL].to_dict()})
    shown = {layer: str(layer) for layer in layers[:: -(-len(layers) // 8)]}
    caption = "What is held, when answers begin, of what the full cache's answers attend to most, by layer."
    return Plot("hits_over_layers", caption, *_decay(run, rates, "layer", shown, "hit rate in %"))


def _tasks(tasks: Sequence[str]) -> str:
    return tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"


def _decay(
    run: Run, scores: Series, x_name: str, places: dict[int, str], y_name: str = "score in %"
) -> tuple[Any, int]:
    """A panel per budget of numbers by policy, budget and place; the full cache in each."""
    budgets = list(dict.fromkeys(budget for policy, budget in run.variants if policy != FULL)) or [FULL]
    points = [
        {"panel": f"budget {budget}", "policy": policy, "x": place, "y": float(score)}
        for budget in budgets
        for (policy, own, place), score in scores.items()
        if policy == FULL or own == budget
    ]

    def x_axis(axes: Any, _: Sequence[float]) -> None:
        if len(places) > 1 and max(places) >= 4 * min(places) > 0:
            axes.set_xscale("log", base=2)
        axes.set_xticks([*places], [*places.values()], rotation=45 if len(places) > 6 else 0, fontsize=9)
        axes.minorticks_off()

    return line_panels(DataFrame(points), x_name, y_name, x_axis, score_axis, size=WIDE, share_y=True)


def score_plots(run: Run) -> Iterator[Plot | None]:
    """Score over the budget, a plot for each kind of tasks; and over bytes."""
    cells = cells_of(run.frame)
    kinds = cells["task"].map(lambda name: _suite(str(name)))
    for suite, mine in cells.groupby(kinds, sort=False):
        caption = "Score over the budget, per task; the full cache as a line."
        panels = len(mine.drop_duplicates(list(PLACE)))
        yield Plot(f"score_over_budget_{suite}", caption, accuracy_by_task(mine)[0], panels)
    yield score_over_bytes(run)


def _suite(name: str) -> str:
    task = TASKS.get(name)
    return "others" if task is None else "longbench_e" if task.is_e else "longbench"


def text_plots(run: Run) -> Iterator[Plot]:
    """Perplexity over the position."""
    if run.texts:
        window = run.sources[0].meta.get("window") if run.sources else None
        length = max(row["length"] for row in run.texts)
        figure, _ = perplexity_by_position(curves(run.texts), length, window if isinstance(window, int) else None)
        yield Plot("perplexity", "Perplexity over the position in the text; one panel per budget.", figure, 2)


def score_over_bytes(run: Run) -> Plot | None:
    """Mean score of the tasks against the bytes that a row holds; a panel per length that has two sizes or more."""
    by, points = ["length", *_LINE], []
    scores, sizes = means(run.frame, by, "score", 100, ["task"]), run.frame.groupby(by, sort=False)["kv_bytes"].mean()
    for length in run.lengths:
        title = f"{length} tokens" if length else "own lengths"
        here = [(one, sizes[one] / 1024, score.value) for one, score in scores.items() if one[0] == length]
        if len({size for (_, policy, _), size, _ in here if policy != FULL and size > 0}) > 1:
            drawn = [point for point in here if point[0][1] == FULL or point[1] > 0]
            points += [
                {"panel": title, "policy": policy, "x": None if policy == FULL else size, "y": score}
                for (_, policy, _), size, score in drawn
            ]
    if not points:
        return None
    names = "keys and values held (KiB per row)", "score in %"
    figure = line_panels(DataFrame(points), *names, budget_axis, score_axis, size=WIDE)
    return Plot("score_over_bytes", "Score over the bytes that a row holds, mean of the tasks.", *figure)


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
    return _over_budget(
        frame, f"efficiency_{length or 'own'}", caption, costs(frame, _LINE)[[*names]].rename(columns=names)
    )


def agreement_plot(run: Run) -> Plot | None:
    """Agreement with the full cache against the budget."""
    frame = run.frame[run.frame["policy"] != FULL]
    names = {"identical tokens (%)": "identical tokens (%)", "KL (nats)": "KL divergence (nats per token)"}
    agreements = agreement(frame, _LINE)[[*names]].rename(columns=names)
    return _over_budget(frame, "agreement", "Agreement with the full cache over the budget, all tasks.", agreements)


def _over_budget(frame: DataFrame, plot: str, caption: str, values_by_name: DataFrame) -> Plot | None:
    """A panel per column that has a number."""
    places = frame.groupby(_LINE)["budget_tokens"].mean().round()
    points = [
        {"panel": name, "policy": policy, "x": None if policy == FULL else places[policy, budget], "y": float(value)}
        for name, values in values_by_name.dropna(axis=1, how="all").items()
        for (policy, budget), value in values.dropna().items()
    ]
    if not points:
        return None

    def from_zero(axes: Any, _: Sequence[float]) -> None:
        axes.set_ylim(0, (axes.get_ylim()[1] or 1) * 1.05)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))

    columns = min(3, values_by_name.notna().any().sum())
    return Plot(plot, caption, *line_panels(DataFrame(points), TOKEN_AXIS, "", budget_axis, from_zero, columns, WIDE))


# ---- needles --------------------------------------------------------------------------------------------------------

DEPTH_BINS = 10


def depth_bins(depths: Iterable[float]) -> tuple[list[str], Callable[[float], int]]:
    """Names of the rows of a heat map, and the row of a depth in [0, 1].

    As many rows as there are depths, if they are few and whole percents; else ten of a tenth each.
    """
    distinct = sorted(set(depths))
    if len(distinct) <= DEPTH_BINS + 1 and all(isclose(100 * depth, round(100 * depth)) for depth in distinct):
        return [f"{100 * depth:.3g}" for depth in distinct], distinct.index
    names = [f"{100 * at // DEPTH_BINS}-{100 * (at + 1) // DEPTH_BINS}" for at in range(DEPTH_BINS)]
    return names, lambda depth: min(int(depth * DEPTH_BINS), DEPTH_BINS - 1)


def needle_tasks(run: Run) -> list[str]:
    """Tasks whose questions are about a place in the prompt."""
    return list(dict.fromkeys(row["task"] for row in run.rows if _depth(row.get("metadata")) is not None))


def _depth(metadata: Any) -> float | None:
    depth = metadata.get("depth") if isinstance(metadata, dict) else None
    return float(depth) if isinstance(depth, (int, float)) and 0 <= depth <= 1 else None


def heat(run: Run, task: str) -> DataFrame:
    """Mean score by depth (rows, from the beginning of the prompt) and by length, policy and budget."""
    here = run.frame[run.frame["task"] == task]
    here = here.assign(depth=here["metadata"].map(_depth).astype(float)).query("depth == depth")
    names, row_of = depth_bins(here["depth"])
    scores = here.assign(row=here["depth"].map(row_of)).pivot_table("score", "row", ["length", *_LINE])
    return scores.reindex(range(len(names))).set_axis(names)


@dataclass(frozen=True, eq=False)
class _Panel:
    title: str
    names: Sequence[str]
    columns: Sequence[tuple[int, Variant]]


def heat_map(run: Run, task: str) -> Plot:
    """Depth by length, a panel per policy and budget; of a single length depth by budget, a panel per policy."""
    lengths = run.lengths_of(task)
    policies = sorted({policy for policy, _ in run.variants if policy != FULL})
    full = [variant for variant in run.variants if variant[0] == FULL]
    panels: list[_Panel | None]
    if len(lengths) > 1:
        panels, columns = _length_panels(run, policies, lengths)
    else:
        variants = {policy: [one for one in run.variants if one[0] == policy] + full for policy in policies}
        panels = [
            _Panel(policy, [budget for _, budget in mine], [(lengths[0], variant) for variant in mine])
            for policy, mine in (variants or {"full cache": full}).items()
        ]
        columns = min(COLUMNS, len(panels))
    figure = _heat_panels(run, task, panels, columns, "length (tokens)" if len(lengths) > 1 else "budget")
    caption = f"{task}: mean score by the depth of the needle (0 is the beginning of the prompt; grey: no question)."
    return Plot(f"depth_{task}", caption, figure, columns)


def _length_panels(run: Run, policies: Sequence[str], lengths: Sequence[int]) -> tuple[list[_Panel | None], int]:
    """A line of panels per policy, with a column per budget; the full cache at the end of the last line."""
    panel = partial(_Panel, names=[str(length) for length in lengths])
    budgets = list(dict.fromkeys(budget for policy, budget in run.variants if policy != FULL))
    full = next((variant for variant in run.variants if variant[0] == FULL), None)
    panels: list[_Panel | None] = []
    for policy in policies or [FULL]:
        for variant in ((policy, budget) for budget in budgets):
            shown = panel(", ".join(variant), columns=[(length, variant) for length in lengths])
            panels.append(shown if variant in run.variants else None)
        if full:
            last = policy == (policies or [FULL])[-1]
            panels.append(panel("full cache", columns=[(length, full) for length in lengths]) if last else None)
    return panels, len(budgets) + bool(full)


def _heat_panels(run: Run, task: str, panels: Sequence[_Panel | None], columns: int, x_name: str) -> Any:
    # As wide as the page, whatever the number of panels; those of a line share axes, which take long to draw.
    lines = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    titles = {panel: wrapped(panel.title, 0.8 * HEAT_WIDTH / columns, 9) for panel in panels if panel}
    # Inches above and below the panels: to measure texts would take as long as drawing.
    above = 0.2 + 0.15 * max(title.count("\n") + 1 for title in titles.values())
    below = 0.2 + 0.07 * max(len(name) for panel in titles for name in panel.names)
    height = len(lines) * (1.6 + above + below) + 0.2
    figure, grid = make_panels(len(lines), 1, (HEAT_WIDTH, height / len(lines)))
    figure.subplots_adjust(0.06, (below + 0.2) / height, 0.91, 1 - above / height, hspace=(above + below) / 1.6)
    scores, image = heat(run, task), None
    colours = colormaps["viridis"].with_extremes(bad="#dddddd")
    depths, pace = len(scores), 1 + max(len(panel.names) for panel in titles)
    for axes, line in zip(grid, lines, strict=True):
        names: dict[float, str] = {}
        for start, panel in zip(range(0, columns * pace, pace), line, strict=False):
            if panel is None:
                continue
            cells = scores.reindex(columns=[(length, *variant) for length, variant in panel.columns])
            extent = (start, start + len(panel.names), depths, 0)
            image = axes.imshow(100 * cells, colours, vmin=0, vmax=100, interpolation="nearest", extent=extent)
            axes.text(start, -depths / 40, titles[panel], fontsize=9, va="bottom", parse_math=False)
            names |= {start + at + 0.5: name for at, name in enumerate(panel.names)}
        axes.set(xlim=(0, columns * pace - 1), ylim=(depths, 0), aspect="auto")
        axes.spines[:].set_visible(False)
        axes.set_xticks([*names], [*names.values()], rotation=60, fontsize=8)
        step = 2 if depths > 6 else 1
        axes.set_yticks([at + 0.5 for at in range(0, depths, step)], scores.index[::step], fontsize=8)
        named(axes, x_name if line is lines[-1] else "", "depth (%)", 9)
    # The scale stands beside all panels, as high as two of them.
    part = min(0.9, 2 / len(lines))
    scale = figure.add_axes((0.925, (1 - part) / 2, 0.012, part))
    figure.colorbar(image, cax=scale).set_label("score in %", fontsize=9)
    return figure

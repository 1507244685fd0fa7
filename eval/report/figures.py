"""The report's plots; those that a run draws too are in `plot`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from statistics import fmean
from typing import Any

from matplotlib.ticker import MaxNLocator

from ..caches.budgets import FULL
from ..data.longbench.tasks import TASKS
from ..store.summaries.aggregates import BUCKETS
from ..store.summaries.plot import SINGLE, TOKEN_AXIS, accuracy_panels, budget_axis, score_axis
from ..store.summaries.plot_style import COLUMNS, FULL_STYLE, finish, make_panels, policy_styles, titled
from ..store.summaries.summary import Cell, held_tokens, over_tasks
from .hits import rates_at
from .measures import Measures, measures_of
from .runs import Run, Variant, prompts_of
from .scores import buckets_of, cells_of

WIDE = (4.2, 3.2)
#: Inches of a heat map, all panels of a line together.
HEAT_WIDTH = 12.0


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


Curve = tuple[list[float], list[float]]


def _policies(run: Run) -> list[str]:
    return sorted({policy for policy, _ in run.variants if policy != FULL})


def overview(runs: Sequence[Run]) -> Plot | None:
    """Mean score over the budget: a panel per run and length of prompts, or per run where that would be many."""
    panels = [(run, length, _mean_cells(run, [length])) for run in runs for length in run.all_lengths]
    if len(panels) > 6:
        panels = [(run, None, _mean_cells(run, run.all_lengths)) for run in runs if run.rows]
    groups = {_panel_title(run, length, len(runs) > 1): cells for run, length, cells in panels if cells}
    if not groups:
        return None
    # A line per run, where that fills the lines.
    columns = 2 if len(groups) == 4 else min(3, len(groups))
    figure = accuracy_panels(groups, columns, SINGLE if len(groups) == 1 else WIDE)
    caption = "Mean score over the tasks, each counting the same, over the budget; the full cache as a line."
    return Plot("overview", caption, figure, columns)


def _mean_cells(run: Run, lengths: Sequence[int | None]) -> list[Cell]:
    """Means over the tasks of some lengths, of every policy and budget that has answered all of them."""
    cells = [
        replace(cell, length=lengths[0] if len(lengths) == 1 else None)
        for cell in cells_of(run)
        if cell.length in lengths
    ]
    wanted = sum(length in lengths for task in run.tasks for length in run.lengths(task))
    counts = Counter((cell.policy, cell.budget) for cell in cells)
    return over_tasks([cell for cell in cells if counts[cell.policy, cell.budget] == wanted])


def _panel_title(run: Run, length: int | None, several: bool) -> str:
    tasks = sum(length in run.lengths(task) for task in run.tasks) if length in run.all_lengths else len(run.tasks)
    size = "" if length is None else f"{length} tokens, "
    title = f"{size}mean of {tasks} task{'s' * (tasks != 1)}"
    return f"{run.label}\n{title}" if several else title


def score_over_length(run: Run) -> Plot | None:
    """Decay: mean score of the tasks that have every length, against the length; one panel per budget."""
    lengths = [length for length in run.all_lengths if length is not None]
    tasks = [task for task in run.tasks if set(lengths) <= set(run.lengths(task))]
    if len(lengths) < 2 or not tasks:
        return None

    def curve(variant: Variant) -> Curve:
        found = [(length, [run.of(task, length, variant) for task in tasks]) for length in lengths]
        whole = [(length, groups) for length, groups in found if all(groups)]
        return [float(length) for length, _ in whole], [
            100 * fmean(fmean(row["score"] for row in rows) for rows in groups) for _, groups in whole
        ]

    caption = f"Score over the length of the prompt, mean of {_tasks(tasks)}; one panel per budget."
    x_name, names = "length of the prompt (tokens)", list(map(str, lengths))
    return Plot("score_over_length", caption, *_decay(run, curve, x_name, lengths, names))


def score_over_buckets(run: Run) -> Plot | None:
    """The same over the buckets of LongBench-E."""
    tasks = [task for task in run.tasks if task in TASKS and TASKS[task].is_e]
    if not tasks:
        return None

    def curve(variant: Variant) -> Curve:
        found = [buckets_of(run, task, variant) for task in tasks]
        whole = [at for at, name in enumerate(BUCKETS) if all(scores[name] is not None for scores in found)]
        return [float(at) for at in whole], [fmean(scores[BUCKETS[at]] or 0.0 for scores in found) for at in whole]

    caption = f"LongBench-E: score over the length of the record, mean of {_tasks(tasks)}; one panel per budget."
    places, x_name = list(range(len(BUCKETS))), "length of the record (words)"
    return Plot("score_over_buckets", caption, *_decay(run, curve, x_name, places, BUCKETS))


def hits_over_layers(run: Run) -> Plot | None:
    """Hit rate by layer; one panel per budget."""
    found = {variant: rates_at(run, variant) for variant in run.variants if variant[0] != FULL}
    layers = sorted({layer for rates in found.values() for layer in rates})
    if len(layers) < 2:
        return None
    whole = {layer: [1.0] for layer in layers}  # the full cache holds everything

    def curve(variant: Variant) -> Curve:
        rates = found.get(variant, whole)
        return [float(layer) for layer in rates], [100 * fmean(heads) for heads in rates.values()]

    caption = "What is held, when answers begin, of what the full cache's answers attend to most, by layer."
    shown = layers[:: -(-len(layers) // 8)]
    panels = _decay(run, curve, "layer", shown, list(map(str, shown)), "hit rate in %")
    return Plot("hits_over_layers", caption, *panels)


def _tasks(tasks: Sequence[str]) -> str:
    return tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"


def _decay(
    run: Run,
    curve: Callable[[Variant], Curve],
    x_name: str,
    places: Sequence[float],
    names: Sequence[str],
    y_name: str = "score in %",
) -> tuple[Any, int]:
    budgets = list(dict.fromkeys(budget for policy, budget in run.variants if policy != FULL)) or [FULL]
    columns = 2 if len(budgets) == 4 else min(3, len(budgets))
    figure, panels = make_panels(len(budgets), columns, WIDE, share_y=True)
    styles, heights = policy_styles(_policies(run)), []
    for axes, budget in zip(panels, budgets, strict=True):
        for policy, own in run.variants:
            if policy == FULL or own == budget:
                places_found, scores = curve((policy, own))
                heights += scores
                style = FULL_STYLE if policy == FULL else {"label": policy, **styles[policy]}
                axes.plot(places_found, scores, **style)
        axes.set_title(f"budget {budget}", fontsize=11)
        if len(places) > 1 and places[-1] >= 4 * places[0] > 0:
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, names, rotation=45 if len(places) > 6 else 0, fontsize=9)
        axes.minorticks_off()
    score_axis(panels[0], heights)
    return finish(figure, panels, columns, x_name, y_name), columns


def efficiency_plot(run: Run, length: int | None) -> Plot | None:
    """Latency and memory against the budget; a panel for everything that was measured."""
    measures = {
        "prefill": "prefill (s per batch)",
        "step": "time per token (ms)",
        "rate": "tokens per second",
        "cache_share": "inside the cache (% of a step)",
        "held": "KV held (MiB per row)",
        "peak": "peak memory (MiB)",
    }
    costs = {variant: measures_of(run.answers(variant, [length])) for variant in run.variants}
    caption = f"Latency and memory over the budget, {prompts_of([run], length)}."
    return _over_budget(run, length, f"efficiency_{length or 'own'}", caption, measures, costs)


def score_over_bytes(run: Run) -> Plot | None:
    """Mean score of the tasks against the bytes that a row holds; a panel per length that has two sizes or more."""
    values: dict[int | None, dict[Variant, float]] = {}
    for cell in over_tasks(cells_of(run)):
        values.setdefault(cell.length, {})[cell.policy, cell.budget] = 100 * cell.accuracy
    places = {
        length: {variant: _kibibytes(run, length, variant) for variant in found} for length, found in values.items()
    }
    lengths = [
        length
        for length, found in places.items()
        if len({place for variant, place in found.items() if place and variant[0] != FULL}) > 1
    ]
    if not lengths:
        return None
    columns = min(3, len(lengths))
    figure, panels = make_panels(len(lengths), columns, WIDE)
    styles = policy_styles(_policies(run))
    for axes, length in zip(panels, lengths, strict=True):
        shown = {variant: place for variant, place in places[length].items() if place and variant[0] != FULL}
        _lines(axes, styles, shown, values[length])
        axes.set_title("own lengths" if length is None else f"{length} tokens", fontsize=11)
        budget_axis(axes, list(shown.values()))
        score_axis(axes, list(values[length].values()))
    figure = finish(figure, panels, columns, "keys and values held (KiB per row)", "score in %")
    return Plot("score_over_bytes", "Score over the bytes that a row holds, mean of the tasks.", figure, columns)


def _kibibytes(run: Run, length: int | None, variant: Variant) -> float | None:
    held = measures_of(run.answers(variant, [length])).get("held")
    return None if held is None else 1024 * held


def agreement_plot(run: Run) -> Plot | None:
    """Agreement with the full cache against the budget."""
    measures = {"identical": "identical tokens (%)", "kl": "KL divergence (nats per token)"}
    found = {variant: measures_of(run.answers(variant)) for variant in run.variants if variant[0] != FULL}
    caption = "Agreement with the full cache over the budget, all tasks."
    return _over_budget(run, ..., "agreement", caption, measures, found)


def _over_budget(
    run: Run,
    length: Any,
    plot: str,
    caption: str,
    measures: Mapping[str, str],
    found: Mapping[Variant, Measures],
) -> Plot | None:
    """One panel per measure that has a number; all lengths if `length` is an ellipsis."""
    every = {
        title: {variant: one[name] for variant, one in found.items() if name in one} for name, title in measures.items()
    }
    known = [(title, values) for title, values in every.items() if values]
    if not known:
        return None
    columns = min(3, len(known))
    figure, panels = make_panels(len(known), columns, WIDE)
    styles = policy_styles(_policies(run))
    places = {variant: _held(run, length, variant) for variant in run.variants if variant[0] != FULL}
    for axes, (name, values) in zip(panels, known, strict=True):
        _lines(axes, styles, places, values)
        axes.set_title(name, fontsize=11)
        axes.set_ylim(0, (axes.get_ylim()[1] or 1) * 1.05)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        budget_axis(axes, [place for place in places.values() if place is not None])
    return Plot(plot, caption, finish(figure, panels, columns, TOKEN_AXIS), columns)


def _lines(
    axes: Any,
    styles: Mapping[str, Any],
    places: Mapping[Variant, float | None],
    heights: Mapping[Variant, float | None],
) -> None:
    """The full cache across, and a line per policy through what is known of it."""
    for variant, height in heights.items():
        if variant[0] == FULL and height is not None:
            axes.axhline(height, **FULL_STYLE)
    known = [(variant[0], place, heights.get(variant)) for variant, place in places.items() if place is not None]
    for policy, style in styles.items():
        points = sorted((place, height) for name, place, height in known if name == policy and height is not None)
        if points:
            axes.plot(*zip(*points, strict=True), label=policy, **style)


def _held(run: Run, length: Any, variant: Variant) -> int | None:
    rows = [row for row in run.rows if (row["policy"], row["budget"]) == variant and length in (..., row["length"])]
    return held_tokens(row["budget_tokens"] for row in rows)


#: Rows and columns of a heat map: its cells, 0 to 1, None where no needle lay.
Heat = list[list[float | None]]
DEPTH_BINS = 10


def depth_bins(depths: Sequence[float]) -> tuple[list[str], Callable[[float], int]]:
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
    return list(dict.fromkeys(row["task"] for row in run.rows if _depth(row) is not None))


def _depth(row: dict[str, Any]) -> float | None:
    depth = (row.get("metadata") or {}).get("depth")
    return float(depth) if isinstance(depth, (int, float)) and 0 <= depth <= 1 else None


def heat(run: Run, task: str, columns: Sequence[tuple[int | None, Variant]]) -> tuple[list[str], Heat]:
    """Mean score by depth (rows, from the beginning of the prompt) and by `columns`."""
    every = [depth for row in run.rows if row["task"] == task and (depth := _depth(row)) is not None]
    names, row_of = depth_bins(every)
    cells: list[list[list[float]]] = [[[] for _ in columns] for _ in names]
    for at, (length, variant) in enumerate(columns):
        for row in run.of(task, length, variant):
            if (depth := _depth(row)) is not None:
                cells[row_of(depth)][at].append(row["score"])
    return names, [[fmean(scores) if scores else None for scores in row] for row in cells]


@dataclass(frozen=True)
class _Panel:
    title: str
    names: Sequence[str]
    columns: Sequence[tuple[int | None, Variant]]


def heat_map(run: Run, task: str) -> Plot:
    """Depth by length, a panel per policy and budget; of a single length depth by budget, a panel per policy."""
    lengths, policies = run.lengths(task), _policies(run)
    full = [variant for variant in run.variants if variant[0] == FULL]
    panels: list[_Panel | None]
    if len(lengths) > 1:
        panels, columns = _length_panels(run, lengths)
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


def _length_panels(run: Run, lengths: Sequence[int | None]) -> tuple[list[_Panel | None], int]:
    """A line of panels per policy, with a column per budget; the full cache at the end of the last line."""
    names = [str(length) for length in lengths]
    budgets = list(dict.fromkeys(budget for policy, budget in run.variants if policy != FULL))
    policies, full = _policies(run), next((variant for variant in run.variants if variant[0] == FULL), None)
    panels: list[_Panel | None] = []
    for policy in policies or [FULL]:
        for variant in ((policy, budget) for budget in budgets):
            known = variant in run.variants
            title = f"{policy}, {variant[1]}"
            panels.append(_Panel(title, names, [(length, variant) for length in lengths]) if known else None)
        if full:
            last = policy == (policies or [FULL])[-1]
            panels.append(_Panel("full cache", names, [(length, full) for length in lengths]) if last else None)
    return panels, len(budgets) + bool(full)


def _heat_panels(run: Run, task: str, panels: Sequence[_Panel | None], columns: int, x_name: str) -> Any:
    # As wide as the page, whatever the number of panels.
    figure, grid = make_panels(len(panels), columns, (HEAT_WIDTH / columns, 2.2))
    image = None
    for index, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        if panel is None:
            axes.remove()
            continue
        rows, cells = heat(run, task, panel.columns)
        numbers = [[float("nan") if value is None else 100 * value for value in row] for row in cells]
        image = axes.imshow(numbers, aspect="auto", vmin=0, vmax=100, cmap="viridis", interpolation="nearest")
        axes.set_facecolor("#dddddd")
        titled(axes, panel.title, 0.8 * HEAT_WIDTH / columns, 9)
        lowest = index + columns >= len(panels) or panels[index + columns] is None
        axes.set_xticks(range(len(panel.names)), panel.names if lowest else [], rotation=60, fontsize=8)
        step = 2 if len(rows) > 6 else 1
        axes.set_yticks(range(0, len(rows), step), rows[::step] if index % columns == 0 else [], fontsize=8)
        axes.set_ylabel("depth (%)" if index % columns == 0 else "", fontsize=9)
        axes.set_xlabel(x_name if lowest else "", fontsize=9)
    figure.tight_layout()
    # Beside all panels, as high as two of them.
    height = min(1.0, 2 / -(-len(panels) // columns))
    scale = figure.add_axes((1.01, (1 - height) / 2, 0.012, height))
    figure.colorbar(image, cax=scale).set_label("score in %", fontsize=9)
    return figure

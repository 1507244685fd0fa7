"""The plot of `policies.py`."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from hf_paged_eviction_eval.caches.budgets import FULL
from hf_paged_eviction_eval.tables.plot_style import save

#: From light to dark, told apart by shape too.
COLOURS = ("#E69F00", "#56B4E9", "#0072B2", "#000000")
MARKERS = ("o", "s", "^", "D")
LEFT, RIGHT = -0.35, 1.15

#: Policy -> share of the distance, or None.
Series = dict[str, float | None]


def plot_shares(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel per mode with all budgets at one block size, and one with all block sizes at one budget."""
    blocks = sorted({run["block_size"] for run in runs})
    budgets = [budget for budget in runs[0]["budgets"] if budget != FULL]
    block = 16 if 16 in blocks else blocks[0]
    budget = "12.5%" if "12.5%" in budgets else budgets[0]
    panels: list[tuple[str, dict[str, Series]]] = []
    for aware in (True, False):
        here = {run["block_size"]: run for run in runs if run["question_aware"] is aware}
        name = "question known" if aware else "question unknown"
        if block in here:
            series = {f"budget {budget}": _series(here[block], budget) for budget in budgets}
            panels.append((f"{name}, blocks of {block}", series))
        if len(here) > 1:
            panels.append((f"{name}, budget {budget}", {f"block {n}": _series(here[n], budget) for n in sorted(here)}))
    policies = _by_rank([series for _, lines in panels for series in lines.values()])
    # As wide as a page of text shows it at its own size: names of policies stay legible there.
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.4 + 2.7 * columns, rows * (1.2 + 0.19 * len(policies))))
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for unused in axes.flat[len(panels) :]:
        unused.remove()
    for panel, (title, lines) in zip(axes.flat, panels, strict=False):
        _draw(panel, title, lines, policies)
    figure.supxlabel("share of the distance from random eviction (0) to the oracle (1), all tasks", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def _series(run: dict[str, Any], budget: str) -> Series:
    return {policy: numbers[0] for policy, numbers in run["budgets"][budget].items()}


def _by_rank(lines: Sequence[Series]) -> list[str]:
    """Policies from worst to best, by their mean over all that is shown."""
    values: dict[str, list[float]] = {}
    for series in lines:
        for policy, share in series.items():
            if share is not None:
                values.setdefault(policy, []).append(max(share, -1.0))
    return sorted(values, key=lambda policy: fmean(values[policy]))


def _draw(axes: Any, title: str, lines: dict[str, Series], policies: Sequence[str]) -> None:
    for index, (label, series) in enumerate(lines.items()):
        places = [(series[name], y) for y, name in enumerate(policies) if series.get(name) is not None]
        # What lies outside is drawn at the edge.
        x = [min(max(share, LEFT), RIGHT) for share, _ in places if share is not None]
        y = [place for _, place in places]
        axes.scatter(
            x, y, s=26, color=COLOURS[index % 4], marker=MARKERS[index % 4], label=label, alpha=0.9, linewidths=0
        )
    for place in (0, 1):
        axes.axvline(place, color="#888888", linewidth=1, zorder=0)
    axes.set_title(title, fontsize=10)
    axes.set_yticks(range(len(policies)), policies, fontsize=9)
    axes.set_ylim(-0.7, len(policies) - 0.3)
    axes.set_xlim(LEFT - 0.05, RIGHT + 0.05)
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.03), ncols=2, frameon=False, fontsize=9)

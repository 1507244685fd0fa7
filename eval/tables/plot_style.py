"""One look for all plots: legible, and told apart without colours too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ..caches.budgets import IN_CACHE
from ..store.results import write_whole

#: Okabe and Ito's palette without its yellow, which is too light for a line.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
#: Dashes are left to the full cache, and to tokens that stand one after the other.
LINES = ("-", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
FULL_STYLE: dict[str, Any] = {"color": "#555555", "linestyle": "--", "linewidth": 1.5, "label": "full cache"}
#: Points by which a line below others is wider than they are.
_BROADER = 4
#: These always look the same. The others, in the order of their names, get the colours that are left.
KNOWN = ("paged_eviction", "streaming_llm", "key_norm", "keydiff", "value_norm", "recency", "random")


def policy_styles(policies: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A look for each policy. Where held tokens stand one after the other: hollow markers on a dashed line."""
    names = sorted(set(policies))
    drawn = dict.fromkeys(name.removesuffix(IN_CACHE) for name in names)
    left = [at for at, name in enumerate(KNOWN) if name not in drawn]
    turns = [(1, at) for at in left] + [(turn, at) for turn in range(2, len(drawn) + 2) for at in range(len(COLOURS))]
    places = dict(zip([name for name in drawn if name not in KNOWN], turns, strict=False))
    places |= {name: (0, at) for at, name in enumerate(KNOWN)}
    styles = {}
    for name in names:
        turn, at = places[name.removesuffix(IN_CACHE)]
        styles[name] = {
            "color": COLOURS[at],
            "marker": MARKERS[(at + turn) % len(MARKERS)],
            "linestyle": LINES[turn % len(LINES)],
            "markersize": 5,
            "linewidth": 1.6,
        }
        if name.endswith(IN_CACHE):
            styles[name] |= {"markerfacecolor": "white", "linestyle": "--"}
    return styles


def make_panels(
    titles: Iterable[str], columns: int, size: tuple[float, float], share_y: bool = False
) -> tuple[Figure, list[Any]]:
    """A figure of axes under these titles, `size` inches each; matplotlib lays them out."""
    listed = list(titles)
    rows = -(-len(listed) // columns)
    # Not through pyplot: plots are files, and whether a program opens windows is not ours to settle.
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    for axes in grid.flat[len(listed) :]:
        axes.remove()
    panels = list(grid.flat[: len(listed)])
    for axes, title in zip(panels, listed, strict=True):
        # As wide as its panel; a dollar sign is one.
        lines = [part for line in title.splitlines() for part in wrap(line, int(size[0] * 11))]
        axes.set_title("\n".join(lines), fontsize=11, parse_math=False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def finish(figure: Figure, panels: list[Any], x_name: str, y_name: str = "") -> None:
    """Names of the axes, and one legend above all panels."""
    figure.supxlabel(x_name, fontsize=10)
    figure.supylabel(y_name, fontsize=10)
    named: dict[str, Any] = {}
    for axes in panels:
        named |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if named:
        width = 0.7 + 0.085 * max(map(len, named))  # inches of an entry
        columns = max(1, min(len(named), int(figure.get_figwidth() / width)))
        legend = figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=columns, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)


def uncover(lines: Sequence[Any]) -> None:
    """Widen lines below others that lie on them, so that all can be seen: the lowest most, by `_BROADER` points."""
    curves = [line.get_xydata() for line in lines]
    for at, line in enumerate(lines):
        same = [curves[at].shape == curve.shape and np.allclose(curves[at], curve, rtol=0.01) for curve in curves]
        share = sum(same[at + 1 :]) / max(1, sum(same) - 1)
        line.set_linewidth(line.get_linewidth() + _BROADER * share)
        line.set_markersize(line.get_markersize() + _BROADER * share)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG or SVG, as the name ends.

    Raises:
        UserError: it cannot be written.
    """
    # Fast compression; without a date and with fixed ids the same numbers give the same file.
    kinds: dict[str, Any] = {".png": {"pil_kwargs": {"compress_level": 1}}, ".svg": {"metadata": {"Date": None}}}
    with matplotlib.rc_context({"svg.hashsalt": "figure", "svg.fonttype": "none"}):
        content = BytesIO()
        figure.savefig(content, format=path.suffix[1:], dpi=150, facecolor="white", **kinds[path.suffix])
    write_whole(path, content.getvalue())

"""One look for all plots: legible, and told apart without colours too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any
from zlib import crc32

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from ..caches.budgets import IN_CACHE

#: Okabe and Ito's palette without its yellow, which is too light for a line.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FULL_STYLE: dict[str, Any] = {"color": "#555555", "linestyle": "--", "linewidth": 1.5, "label": "full cache"}
PANEL = (3.1, 2.7)
COLUMNS = 4

#: These always look the same; other policies get what their name decides.
KNOWN = ("paged_eviction", "streaming_llm", "key_norm", "keydiff", "value_norm", "recency", "random")
#: Dotted and dash-dotted lines are left to the others: never mistaken for one of `KNOWN`, nor for the full cache.
_OTHERS: tuple[dict[str, Any], ...] = tuple(
    {"color": colour, "marker": MARKERS[(index + shift) % len(MARKERS)], "linestyle": line}
    for shift, line in ((1, ":"), (2, "-."), (3, (0, (5, 1, 1, 1, 1, 1))), (4, (0, (1, 3))))
    for index, colour in enumerate(COLOURS)
)


def policy_styles(policies: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A line style per policy; the same policy looks the same in every plot (two that clash: the second moves on).

    Where held tokens stand one after the other, it is that of the policy with hollow markers on a dashed line.
    """
    styles: dict[str, dict[str, Any]] = {}
    free = list(range(len(_OTHERS)))
    names = sorted(set(policies))  # in this order: a legend must not differ from run to run
    for name in sorted({name.removesuffix(IN_CACHE) for name in names}):
        if name in KNOWN:
            at = KNOWN.index(name)
            look = {"color": COLOURS[at], "marker": MARKERS[at], "linestyle": "-"}
        else:
            free = free or list(range(len(_OTHERS)))
            wanted = crc32(name.encode())
            slot = min(free, key=lambda slot: (slot - wanted) % len(_OTHERS))
            free.remove(slot)
            look = _OTHERS[slot]
        styles[name] = look | {"markersize": 5, "linewidth": 1.6}
    moved = {"markerfacecolor": "white", "linestyle": "--"}
    return {name: styles[name.removesuffix(IN_CACHE)] | (moved if name.endswith(IN_CACHE) else {}) for name in names}


def make_panels(
    count: int, columns: int, panel: tuple[float, float] = PANEL, share_y: bool = False
) -> tuple[Figure, list[Any]]:
    """A figure of `count` axes, `panel` inches each."""
    rows = -(-count // columns)
    # Not through pyplot: plots are files, and whether a program opens windows is not ours to settle.
    figure = Figure(figsize=(panel[0] * columns, panel[1] * rows))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    for axes in grid.flat[count:]:
        axes.remove()
    return figure, list(grid.flat[:count])


def titled(axes: Any, title: str, inches: float, size: int = 11) -> None:
    """A title in lines as wide as its panel, so that neighbours do not overlap; a dollar sign in it is one."""
    longest = max(8, int(inches * 72 / (0.58 * size)))
    lines = [part for line in title.splitlines() for part in wrap(line, longest)]
    # At y = 1: nothing above the panel has to be looked for.
    axes.set_title("\n".join(lines), fontsize=size, y=1.0, parse_math=False)


def logarithmic(axis: Any) -> None:
    """Ticks at 1, 2, 5, 10, ... on a logarithmic axis, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def finish(figure: Figure, panels: Sequence[Any], columns: int, x_name: str, y_name: str = "") -> None:
    """Names of the axes at the edges only, one legend above all panels, and margins.

    Margins are inches that hold titles and numbers of a usual size: to measure them would take as long as drawing.
    """
    for index, axes in enumerate(panels):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(x_name if index + columns >= len(panels) else "")
        axes.set_ylabel(y_name if index % columns == 0 else "")
    width, height = figure.get_size_inches()
    rows = -(-len(panels) // columns)
    lines = max(axes.get_title().count("\n") + 1 for axes in panels)
    above, below = 0.1 + 0.19 * lines, 0.45
    left, bottom, between = 0.75, below + 0.25, 0.5
    figure.subplots_adjust(left / width, bottom / height, 1 - 0.1 / width, 1 - above / height)
    across = (width - left - 0.1 - between * (columns - 1)) / columns
    up = (height - bottom - above - (above + below) * (rows - 1)) / rows
    figure.subplots_adjust(wspace=between / across, hspace=(above + below) / up)
    named: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if named:
        legend = figure.legend(
            named.values(),
            named.keys(),
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=max(2, min(len(named), 4, columns + 1)),
            frameon=False,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)


def save(figure: Any, path: Path) -> None:
    """Write the figure as PNG or SVG, as the name ends."""
    # Legends stand outside, all else inside. To measure all of it would take as long as drawing.
    extent = Bbox.union([figure.bbox, *(legend.get_window_extent() for legend in figure.legends)])
    extent = extent.transformed(figure.dpi_scale_trans.inverted())
    # Fast compression; without a date and with fixed ids the same numbers give the same file.
    kinds: dict[str, Any] = {".png": {"pil_kwargs": {"compress_level": 1}}, ".svg": {"metadata": {"Date": None}}}
    with matplotlib.rc_context({"svg.hashsalt": "figure", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, bbox_inches=extent, facecolor="white", **kinds[path.suffix])

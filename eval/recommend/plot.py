"""Divergence over bytes and over step time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..store.summaries.plot_style import COLOURS, finish, logarithmic, make_panels, save
from .ranking import Found

_PANEL = (5.0, 3.8)
_GREY = "#b0b0b0"
_BEST = {"marker": "*", "s": 130, "zorder": 4, "color": COLOURS[0]}
_FRONT = {"marker": "o", "s": 34, "zorder": 3, "color": COLOURS[1]}


def plot_front(found: Sequence[Found], numbered: Sequence[Found], chosen: Sequence[Found], path: Path) -> None:
    """Two panels.

    Args:
        found: all candidates; hollow where they were dropped before the end.
        numbered: those of the front, numbered as in the table.
        chosen: the best of each size.
        path: of the PNG file; an SVG file is written beside it.
    """
    unit, size = ("MiB", 2**20) if max(each.bytes for each in found) > 4 * 2**20 else ("KiB", 2**10)
    axes_of: tuple[tuple[str, Callable[[Found], float]], ...] = (
        (f"bytes on the device ({unit})", lambda each: each.bytes / size),
        ("time of a decode step (ms)", lambda each: each.step_ms),
    )
    figure, panels = make_panels(2, 2, _PANEL, share_y=True)
    for axes, (_, value) in zip(panels, axes_of, strict=True):
        _draw(axes, value, found, numbered, chosen)
    finish(figure, panels, 2, "", "")
    for axes, (name, _) in zip(panels, axes_of, strict=True):
        axes.set_xlabel(name)
    panels[0].set_ylabel("divergence from the full cache (nats)")
    figure.tight_layout()
    save(figure, path)
    with path.with_suffix(".svg").open("wb") as file:
        save(figure, file)


def _draw(
    axes: Any,
    value: Callable[[Found], float],
    found: Sequence[Found],
    numbered: Sequence[Found],
    chosen: Sequence[Found],
) -> None:
    shown = [each for each in found if 0 < each.divergence < float("inf")]
    for finalist, face, label in ((False, "none", "dropped early"), (True, _GREY, "read to the end")):
        points = [each for each in shown if each.finalist == finalist]
        if points:
            places = [value(each) for each in points], [each.divergence for each in points]
            axes.scatter(*places, s=22, facecolors=face, edgecolors=_GREY, linewidths=0.9, label=label, zorder=2)
    for number, each in enumerate(numbered, 1):
        if each not in shown:
            continue
        best = each in chosen
        place, label = (value(each), each.divergence), "recommended" if best else "front"
        style: dict[str, Any] = _BEST if best else _FRONT
        axes.scatter(*place, label=label, **style)
        axes.annotate(str(number), place, xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set_xlim(left=0)
    if shown and max(each.divergence for each in shown) > 4 * min(each.divergence for each in shown):
        axes.set_yscale("log")
        logarithmic(axes.yaxis)

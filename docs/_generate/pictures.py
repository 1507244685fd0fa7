"""How pictures of docs/images are drawn: matplotlib lays out every text, and one style serves light and dark pages."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[1] / "images"
#: By name, the colour on a light page and on a dark one.
COLOURS = {
    "ground": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#d0d7de", "#30363d"),
    "grey": ("#8c959f", "#8c959f"),
    "pale": ("#b8bfc8", "#4b535d"),
    "blue": ("#0969da", "#58a6ff"),
    "amber": ("#bf8700", "#d29922"),
    "green": ("#1a7f37", "#3fb950"),
    "pink": ("#bf3989", "#f778ba"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
#: Letters become shapes, so that a picture needs no font.
_SETTINGS: dict[str, Any] = {"svg.hashsalt": "docs", "svg.fonttype": "path"}


def make_axes(title: str, about: str, inches: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure of one panel, with a title and a line or two about what was measured."""
    figure = Figure(
        figsize=inches, layout="constrained", facecolor=LIGHT["ground"], edgecolor=LIGHT["faint"], linewidth=1
    )
    axes = figure.subplots()
    axes.set_facecolor(LIGHT["ground"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT["grey"])
    axes.tick_params(color=LIGHT["grey"], labelcolor=LIGHT["ink"])
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(LIGHT["ink"])
    axes.set_title(about, loc="left", size=9, color=LIGHT["ink"])
    figure.suptitle(title, x=0.02, ha="left", weight="bold", size=11, color=LIGHT["ink"])
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.05)
    return figure, axes


def legend(figure: Figure, columns: int) -> None:
    """One legend, below the panel."""
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, labelcolor=LIGHT["ink"], fontsize=9)


def svg(figure: Figure) -> str:
    """The picture as text: the same numbers give the same text."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, edgecolor=figure.get_edgecolor())
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in COLOURS.values()
        for kind in ("fill", "stroke")
        if light != dark
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    text = re.sub("(<svg [^>]*>)", rf"\1\n {style}", buffer.getvalue(), count=1)
    return re.sub(r" +$", "", text, flags=re.MULTILINE)

"""The picture of a text without end: perplexity by position, for both ways of counting positions."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from measured import load
from pictures import IMAGES, LIGHT, legend, make_axes

IMAGE = IMAGES / "endless_text.svg"
#: Colour, marker and width of the line: what lies below is wider, since two of them coincide.
_LOOKS = {"recency": ("amber", "P", 6.0), "streaming_llm": ("blue", "s", 1.6), "keydiff": ("pink", "D", 1.6)}
#: Measured parts of a lap that are one point.
_TOGETHER = 5


def draw() -> Figure:
    """The picture."""
    results = load("endless_text")
    settings = results["settings"]
    (budget,) = {run["budget"] for run in results["runs"]}
    figure, axes = make_axes(
        "Text without end: perplexity by position",
        f"The small model, {budget} tokens held. Positions count in the text or in the cache.\n"
        "Dotted: the model's window.",
        (7.0, 4.4),
    )
    for run in results["runs"]:
        starts = range(0, len(run["loss"]) - _TOGETHER + 1, _TOGETHER)
        places = [(start + _TOGETHER / 2) * run["lap"] / settings["bins"] / 1000 for start in starts]
        parts = [slice(start, start + _TOGETHER) for start in starts]
        values = [math.exp(sum(run["loss"][part]) / sum(run["count"][part])) for part in parts]
        colour, marker, width = _LOOKS[run["policy"]]
        style = {"linestyle": "--", "markerfacecolor": LIGHT["ground"]} if run["positions"] == "text" else {}
        label = f"{run['policy']}, {run['positions']}"
        axes.plot(
            places,
            values,
            color=LIGHT[colour],
            marker=marker,
            markersize=2.5 + width,
            linewidth=width,
            label=label,
            **style,
        )
    axes.axvline(settings["window"] / 1000, color=LIGHT["grey"], linewidth=1.2, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("position in the text (thousands of tokens)")
    axes.set_ylabel("perplexity")
    axes.grid(axis="y", color=LIGHT["faint"], linewidth=0.6)
    legend(figure, 3)
    return figure

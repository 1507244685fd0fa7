"""The picture of the README: how many answers are left, a column of the table of real models."""

from __future__ import annotations

import front
from matplotlib.figure import Figure
from pictures import IMAGES, LIGHT, make_axes

IMAGE = IMAGES / "quality.svg"


def draw() -> Figure:
    """The picture."""
    figure, axes = make_axes(
        "How many answers are left?",
        "SmolLM2-135M. 900 tokens are compressed, then one fact is asked for.\n"
        "1/8: of the memory of 16-bit keys and values. Full cache: 100 %.",
        (6.4, 3.9),
    )
    lines = front.lines()[::-1]  # bars begin at the bottom
    names = [f"{line.cache.replace('`', '').replace(', as published', '')}, {line.share}" for line in lines]
    colours = [LIGHT["blue" if "prepare" in line.cache else "pale"] for line in lines]
    bars = axes.barh(names, [line.right for line in lines], color=colours, height=0.7)
    axes.bar_label(bars, [f"{line.right} %" for line in lines], padding=4, color=LIGHT["ink"], size=9)
    axes.set_xlim(0, 108)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure

"""The picture of the README: how many answers a quarter of the memory keeps."""

from __future__ import annotations

import front
from matplotlib.figure import Figure
from pictures import IMAGES, LIGHT, make_axes
from real_rows import UNPREPARED

IMAGE = IMAGES / "quality.svg"
#: The bars from below: table of needles, policy, what the picture calls it, and its colour.
_BARS = (
    ("prepared", "auto", "after prepare", "blue"),
    ("without", UNPREPARED, "without prepare", "blue"),
    ("needles", "keydiff", "keydiff", "pale"),
    ("needles", "compactor", "compactor", "pale"),
    ("needles", "paged_eviction", "paged_eviction", "pale"),
    ("needles", "expected_attention", "expected_attention", "pale"),
    ("needles", "tova", "tova", "pale"),
    ("needles", "snapkv", "snapkv", "pale"),
    ("needles", "random", "random eviction", "pale"),
)


def draw() -> Figure:
    """The picture."""
    figure, axes = make_axes(
        "A quarter of the memory: how many answers are left?",
        "SmolLM2-135M. The text is compressed, then a fact is asked for.\n100 % are the answers of the full cache.",
        (6.4, 3.7),
    )
    shares = [100 * float(front.right(rows, "unknown", policy, front.QUARTER).mean()) for rows, policy, _, _ in _BARS]
    bars = axes.barh([name for *_, name, _ in _BARS], shares, color=[LIGHT[colour] for *_, colour in _BARS], height=0.7)
    axes.bar_label(bars, [f"{share:.0f} %" for share in shares], padding=4, color=LIGHT["ink"], size=9)
    axes.set_xlim(0, 108)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure

"""The picture of the README: how many answers a quarter of the memory keeps."""

from __future__ import annotations

from pathlib import Path

import front
from real_tables import UNPREPARED

IMAGE = Path(__file__).resolve().parents[1] / "images" / "quality.svg"
#: The bars: table of needles, policy, what the picture calls it, and whether it is a default.
_BARS = (
    ("needles", "random", "random eviction", False),
    ("needles", "snapkv", "snapkv", False),
    ("needles", "tova", "tova", False),
    ("needles", "expected_attention", "expected_attention", False),
    ("needles", "paged_eviction", "paged_eviction", False),
    ("needles", "compactor", "compactor", False),
    ("needles", "keydiff", "keydiff", False),
    ("without", UNPREPARED, "without prepare", True),
    ("prepared", "auto", "after prepare", True),
)
_WIDTH, _LEFT, _LONGEST, _STEP = 620, 190, 360, 30
STYLE = """  <style>
    .ground { fill: #ffffff; stroke: #d0d7de; }
    .other { fill: #b8bfc8; }
    .ours { fill: #0969da; }
    text { fill: #1f2328; font: 14px "DejaVu Sans", "Segoe UI", Helvetica, Arial, sans-serif; }
    .title { font-weight: bold; }
    .end { text-anchor: end; }
    .small { font-size: 12.5px; }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #0d1117; stroke: #30363d; }
      .other { fill: #4b535d; }
      .ours { fill: #58a6ff; }
      text { fill: #e6edf3; }
    }
  </style>"""


def svg() -> str:
    """The picture as text."""
    bars = [
        (100 * float(front.right(rows, "unknown", policy, front.QUARTER).mean()), name, ours)
        for rows, policy, name, ours in _BARS
    ]
    lines = []
    for at, (value, name, ours) in enumerate(bars):
        y = 66 + at * _STEP
        width = max(_LONGEST * value / 100, 1.5)
        lines += [
            f'  <text x="{_LEFT - 10}" y="{y + 15}" class="end">{name}</text>',
            f'  <rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="20" class="{"ours" if ours else "other"}"/>',
            f'  <text x="{_LEFT + width + 8:.1f}" y="{y + 15}" class="small">{value:.0f} %</text>',
        ]
    height = 66 + len(bars) * _STEP + 10
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img">',
        "  <title>Answers that a quarter of the memory keeps, per policy</title>",
        STYLE,
        f'  <rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="6" class="ground"/>',
        '  <text x="16" y="28" class="title">A quarter of the memory: how many answers are left?</text>',
        '  <text x="16" y="48" class="small">SmolLM2-135M; facts are asked for after the text was compressed; '
        "of the answers that the full cache gives</text>",
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"

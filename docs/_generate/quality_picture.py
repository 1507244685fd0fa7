"""The picture of the README, from the profile that ships with the package: divergence at a quarter of the memory."""

from __future__ import annotations

from pathlib import Path

import hf_paged_eviction
from hf_paged_eviction.learned.calibration import load_calibration

PROFILE = Path(hf_paged_eviction.__file__).parent / "learned/calibration/published/smollm2-135m-instruct.safetensors"
IMAGE = Path(__file__).resolve().parents[1] / "images" / "quality.svg"
_SHARE, _ASPECT = 0.25, "asked later"
#: The bars: unit and label in the profile, what the picture calls it, and whether it is what `prepare` chose.
_BARS = (
    ("tokens", "tova", "tova", False),
    ("tokens", "random", "random eviction", False),
    ("tokens", "snapkv", "snapkv", False),
    ("tokens", "keydiff", "keydiff", False),
    ("tokens", "leverage", "leverage", False),
    ("tokens", "observed@heads", "after prepare", True),
    ("bytes", "observed@heads, 4 bits", "after prepare, 4 bits", True),
)
_WIDTH, _LEFT, _LONGEST, _STEP = 620, 190, 360, 30
_STYLE = """  <style>
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
    measured = load_calibration(PROFILE).measured
    assert measured is not None
    found = {(row.unit, row.label): row.mean(_ASPECT) for row in measured.rows if row.share == _SHARE}
    bars = [(found[unit, label], name, ours) for unit, label, name, ours in _BARS]
    longest = max(value for value, *_ in bars)
    lines = []
    for at, (value, name, ours) in enumerate(bars):
        y = 66 + at * _STEP
        width = max(_LONGEST * value / longest, 1.5)
        lines += [
            f'  <text x="{_LEFT - 10}" y="{y + 15}" class="end">{name}</text>',
            f'  <rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="20" class="{"ours" if ours else "other"}"/>',
            f'  <text x="{_LEFT + width + 8:.1f}" y="{y + 15}" class="small">{value:.3f}</text>',
        ]
    height = 66 + len(bars) * _STEP + 10
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img">',
        "  <title>Divergence from the full cache, per policy, at a quarter of the memory</title>",
        _STYLE,
        f'  <rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="6" class="ground"/>',
        '  <text x="16" y="28" class="title">A quarter of the memory: how far from the full cache?</text>',
        '  <text x="16" y="48" class="small">SmolLM2-135M; a fact is asked for after the text was compressed; '
        "KL divergence in nats</text>",
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"

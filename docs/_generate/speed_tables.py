"""Time and bytes of a token beside other caches, from `peers_speed.jsonl`: tables, and a picture of how they grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured import RESULTS, where
from quality_picture import STYLE
from writing import table

ROWS = RESULTS / "peers_speed.jsonl"
IMAGE = Path(__file__).resolve().parents[1] / "images" / "peers_speed.svg"
_MODELS = {
    "smollm2": "SmolLM2-135M",
    "1b-float32": "1B, float32",
    "1b-bfloat16": "1B, bfloat16",
}
#: Candidates of the table, as the page calls them; the first are of this package.
_NAMES = {
    "eager": "this cache",
    "compiled": "this cache, `static=True`, compiled",
    "heads": "this cache, shares of heads",
    "4 bits": "this cache, `bits=4`",
    "same tokens": "`DynamicCache` with 1,024 tokens",
    "kvpress": "kvpress, `KeyDiffPress`",
    "quantized": "`QuantizedCache`, quanto, 4 bits",
    "offloaded": "`DynamicCache(offloading=True)`",
}
_READ = {"whole": "this cache, in one forward", "in chunks": "this cache, in chunks of 512", "kvpress": "kvpress"}
_NAMES_OF = {"token": _NAMES, "reading": _READ}
#: Lines of the picture, and how they are drawn.
_LINES = {
    "dynamic": ("DynamicCache", "full"),
    "4 bits": ("this cache, 4 bits", "few"),
    "eager": ("this cache", "ours"),
    "compiled": ("this cache, compiled", "compiled"),
}
_STROKES = """  <style>
    .line { fill: none; stroke-width: 2; }
    .line.full { stroke: #8c959f; }
    .line.ours { stroke: #0969da; }
    .line.few { stroke: #bf8700; }
    .line.compiled { stroke: #1a7f37; }
    .middle { text-anchor: middle; }
  </style>"""
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 620, 300, 60, 64, 430, 252


def rows() -> list[dict[str, Any]]:
    """All that were measured."""
    return [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()]


def speed(kind: str) -> str:
    """A table of each model and batch: "token" or "reading"."""
    parts = [f"{title}:\n\n{content}" for title, content in _tables(kind)]
    environments = sorted({where(row["environment"]) for row in _listed(kind)})
    return "\n\n".join([*parts, f"(`python benchmarks/peers.py speed`; {'; '.join(environments)}.)"])


def _listed(kind: str) -> list[dict[str, Any]]:
    """The rows of the candidates that its tables name."""
    return [row for row in rows() if row["kind"] == kind and row["candidate"] in _NAMES_OF[kind]]


def _tables(kind: str) -> Iterator[tuple[str, str]]:
    names, of_kind = _NAMES_OF[kind], _listed(kind)
    for model, title in _MODELS.items():
        for batch in sorted({row["rows"] for row in of_kind if row["model"] == model}):
            here = [row for row in of_kind if (row["model"], row["rows"]) == (model, batch)]
            lengths = sorted({row["length"] for row in here})
            cells = {(row["candidate"], row["length"]): row for row in here}
            lines = [
                [name, *(_cell(cells.get((candidate, length))) for length in lengths)]
                for candidate, name in names.items()
                if any(row["candidate"] == candidate for row in here)
            ]
            header = "cache", *(f"{length:,} tokens" for length in lengths)
            yield f"{title}, {_batch(batch)}", table(header, lines)


def _batch(rows: int) -> str:
    return "one row" if rows == 1 else f"{rows} rows with pads"


def _cell(row: dict[str, Any] | None) -> str:
    """Time and bytes, as ratios to DynamicCache."""
    if row is None:
        return ""
    if "refused" in row:
        return "does not run"
    name = "bytes" if row["kind"] == "token" else "peak_bytes"
    full = row[f"dynamic_{name}"]
    # A short prompt takes no more than loading the model took: nothing is known of its peak.
    return f"{row['ratio']:.2f} ({row[name] / full:.2f})" if full else f"{row['ratio']:.2f}"


def svg() -> str:
    """The picture: milliseconds of a token by the length of the text, SmolLM2, one row."""
    lines = _series()
    most = max(time for _, points in lines for _, time in points) * 1.1
    lengths = sorted({length for _, points in lines for length, _ in points})
    longest = max(lengths)

    def place(length: int, time: float) -> tuple[float, float]:
        return _LEFT + (_RIGHT - _LEFT) * length / longest, _BOTTOM - (_BOTTOM - _TOP) * time / most

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img">',
        "  <title>Time of a token by the length of the text</title>",
        STYLE,
        _STROKES,
        f'  <rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="6" class="ground"/>',
        '  <text x="16" y="28" class="title">A decoded token, in milliseconds of CPU time</text>',
        '  <text x="16" y="48" class="small">SmolLM2-135M, one thread, budget 1,024; by the tokens before it</text>',
        f'  <path d="M{_LEFT} {_TOP} V{_BOTTOM} H{_RIGHT}" fill="none" stroke="#8c959f"/>',
    ]
    for length in lengths:
        x, _ = place(length, 0)
        parts.append(f'  <text x="{x:.1f}" y="{_BOTTOM + 20}" class="small middle">{length // 1024}k</text>')
    for name, points in lines:
        label, kind = _LINES[name]
        at = [place(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'  <polyline points="{path}" class="line {kind}"/>')
        x, y = at[-1]
        parts.append(f'  <text x="{x + 8:.1f}" y="{y + 5:.1f}" class="small">{label}, {points[-1][1]:.0f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _series() -> list[tuple[str, list[tuple[int, float]]]]:
    """Of each line its points: the ratio of a candidate times what `DynamicCache` takes in the row of `eager`."""
    here = [
        row for row in rows() if (row["kind"], row["model"], row["rows"]) == ("token", "smollm2", 1) and "ratio" in row
    ]
    full = {row["length"]: row["dynamic_ms"] for row in here if row["candidate"] == "eager"}
    curves = [("dynamic", sorted(full.items()))]
    for name in list(_LINES)[1:]:
        points = {row["length"]: row["ratio"] * full[row["length"]] for row in here if row["candidate"] == name}
        curves.append((name, sorted(points.items())))
    return [(name, points) for name, points in curves if points]

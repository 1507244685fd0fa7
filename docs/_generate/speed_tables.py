"""Time and bytes of a token beside other caches, from `peers_speed.jsonl`: tables, and a picture of how they grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure
from measured import RESULTS, where
from pictures import IMAGES, LIGHT, legend, make_axes
from writing import table

ROWS = RESULTS / "peers_speed.jsonl"
IMAGE = IMAGES / "peers_speed.svg"
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
#: Lines of the picture: what it calls them, colour and marker.
_LINES = {
    "dynamic": ("DynamicCache", "grey", "o"),
    "4 bits": ("this cache, 4 bits", "amber", "s"),
    "eager": ("this cache", "blue", "D"),
    "compiled": ("this cache, compiled", "green", "^"),
}


def rows() -> list[dict[str, Any]]:
    """All that were measured."""
    return [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()]


def speed(kind: str) -> str:
    """A table of each model and batch: "token" or "reading"."""
    parts = [f"{title}:\n\n{content}" for title, content in _tables(kind)]
    environments = sorted({where(row["environment"]) for row in _listed(kind)})
    return "\n\n".join([*parts, f"(`python benchmarks/peers_speed.py`; {'; '.join(environments)}.)"])


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


def draw() -> Figure:
    """The picture: milliseconds of a token by the length of the text, SmolLM2, one row."""
    figure, axes = make_axes(
        "A decoded token, in milliseconds of CPU time",
        "SmolLM2-135M, one thread, budget 1,024. Both axes are logarithmic.\nIn the legend: after 32,768 tokens.",
        (6.4, 3.9),
    )
    lengths: list[int] = []
    for name, points in _series():
        label, colour, marker = _LINES[name]
        lengths, times = [list(column) for column in zip(*points, strict=True)]
        label = f"{label}: {times[-1]:.0f} ms"
        axes.plot(lengths, times, color=LIGHT[colour], marker=marker, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_yticks([50, 100, 200, 500, 1000], ["50", "100", "200", "500", "1,000"])
    axes.minorticks_off()
    axes.set_xlabel("tokens before it")
    axes.set_ylabel("ms")
    axes.grid(axis="y", color=LIGHT["faint"], linewidth=0.6)
    legend(figure, 2)
    return figure


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

"""What the benchmarks share: results with hardware and versions, tables in pages."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from hf_paged_eviction_eval.errors import reason
from hf_paged_eviction_eval.models.environment import cpu_name, hardware, versions
from hf_paged_eviction_eval.running.memory import free_memory

RESULTS = Path(__file__).parent / "results"


def timed_on() -> dict[str, Any]:
    """What a timing on the CPU was taken on, and the versions."""
    return {"cpu": cpu_name(), "torch_threads": torch.get_num_threads(), "device": "cpu", **versions()}


def save(name: str, results: dict[str, Any]) -> None:
    """Write `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": timed_on(), **results}, indent=2) + "\n")
    print(f"written: {path}")


def measured(
    options: argparse.Namespace, keys: Iterable[dict[str, Any]], measure: Callable[[dict[str, Any]], dict[str, Any]]
) -> bool:
    """Write `summary.json` of a folder row by row; whether all were measured. What it has is not measured again.

    Args:
        options: what was typed: decides the numbers, but for `output`, the folder, and `threads` of torch.
        keys: what each row is of.
        measure: its numbers. If it raises, the row has the reason, and is tried again by the next call.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    path = Path(options.output, "summary.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps({name: value for name, value in vars(options).items() if name != "output"}))
    found = {"environment": {"versions": versions(), "hardware": hardware(1)}, "settings": settings}
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    kept = before.get("rows", []) if {**before, "rows": None} == {**found, "rows": None} else []
    rows: list[dict[str, Any]] = []
    for key in keys:
        row = next((row for row in kept if "reason" not in row and row.items() >= key.items()), None)
        if row is None:
            try:
                row = {**key, **measure(key)}
            except Exception as error:
                row = {**key, "reason": reason(error)}
            free_memory()
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        path.write_text(json.dumps({**found, "rows": rows}, indent=2) + "\n", "utf-8")
    return not any("reason" in row for row in rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; numbers from the second column on."""
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(values: Iterable[float], digits: int = 0, sign: str = "") -> str:
    """Mean and its standard error; "+" = with the sign of the mean."""
    numbers = [float(value) for value in values]
    error = f" ± {stdev(numbers) / sqrt(len(numbers)):.{digits}f}" if len(numbers) > 2 else ""
    return f"{fmean(numbers):{sign}.{digits}f}{error}"

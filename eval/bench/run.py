"""A whole benchmark: measured group by group, each written as soon as it is there, and shown."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import torch
from rich.console import Console

from ..console import progress, say
from ..models.environment import commit, hardware, model_facts, versions
from ..options.bench import BenchOptions
from ..progress import Progress, Watch
from ..store.results import SUMMARY, ResultFolder, Row, settings_differences, write_json
from .decoding import Group, decode_keys
from .rows import MEASURED, BenchKey, row_key
from .settings import BenchSettings, read
from .shapes import make_model
from .steps import copy_bandwidth
from .table import reasons, tables
from .variants import VARIANTS


def run_options(options: BenchOptions) -> bool:
    """Measure what was typed with a progress bar, show tables; whether all that was asked for was measured."""
    notes, settings = Console(stderr=True), on_this_machine(read(options, VARIANTS))
    with progress(notes, "measurements", lambda _: "fewer --contexts, --budgets, --variants or --rounds") as watch:
        rows, differences = run_bench(settings, options.output, watch)
    for table in tables(rows):
        table.show(Console())
    for note in [*differences, *reasons(rows)]:
        say(notes, f"note: {note}")
    say(notes, f"written to {options.output}: rows, settings, {SUMMARY}")
    return all(row["status"] == MEASURED for row in rows)


def plan(settings: BenchSettings) -> list[list[BenchKey]]:
    """All rows of a run, those together that are measured together."""
    return [decode_keys(settings, budget, batch) for batch, budget in product(settings.batch_sizes, settings.budgets)]


def run_bench(settings: BenchSettings, output: Path, watch: Watch) -> tuple[list[Row], list[str]]:
    """Measure what is not yet in the folder: all rows, and how those of other settings differ.

    Args:
        output: folder of results; a run with the same settings is continued.
        watch: told of progress.
    """
    folder = ResultFolder(output, {"": settings.as_json()}, row_key)
    groups, model, started = plan(settings), None, time.monotonic()
    folder.write_meta({"versions": versions(), "hardware": hardware(1), "complete": False})
    finished, total = 0, sum(map(len, groups))
    for keys in groups:
        if not all(key in folder.rows for key in keys):

            def tell(last: str, finished: int = finished) -> None:
                watch(Progress(finished, total, last))

            tell("model")
            if model is None:
                model, bandwidth = make_model(settings), copy_bandwidth(torch.device(settings.device))
                folder.write_meta({"model": model_facts(model), "bandwidth": bandwidth})
            folder.add(Group(model, settings, keys, folder.meta["bandwidth"], tell).measure())
            summarise(settings, folder)
        finished += len(keys)
    watch(Progress(total, total))
    folder.write_meta({"complete": True, "seconds": time.monotonic() - started})
    return summarise(settings, folder), settings_differences(folder)


def summarise(settings: BenchSettings, folder: ResultFolder) -> list[Row]:
    """Rows in the order of the plan, written into the file that holds them."""
    rows = [folder.rows[key] for keys in plan(settings) for key in keys if key in folder.rows]
    facts = ("versions", "hardware", "model", "bandwidth")
    environment = {name: folder.meta[name] for name in facts if name in folder.meta}
    write_json(folder.path / SUMMARY, {"environment": environment, "settings": settings.as_json(), "rows": rows})
    return rows


def on_this_machine(settings: BenchSettings) -> BenchSettings:
    """The settings, with what the times depend on."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    installed, place = versions(), hardware(1)
    machine = {
        "device": place["cpu"] if settings.device == "cpu" else [card["name"] for card in place["accelerators"]],
        "torch_threads": place["torch_threads"],
        "commit": commit() or installed["hf_paged_eviction"],
        **{name: installed[name] for name in ("torch", "transformers", "python")},
    }
    return settings.but(machine=machine)

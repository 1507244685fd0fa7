"""`paged-eviction bench --preset serving`: what was typed, measured, shown and written."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_paged_eviction.serving import UnsupportedTransformersError
from hf_paged_eviction.serving.contract import check_transformers

from ...errors import UserError
from ...options.bench import BenchOptions
from ...running.terminal import say
from ...store.results import SUMMARY
from ...store.summaries.formats import to_terminal
from ...store.summaries.table import Table, simple_table
from ..shapes import SHAPES, choose_device
from ..summary import a_shape, in_tokens, measure_once, refuse_others
from .answering import run_serving
from .bookkeeping import run_bookkeeping
from .trace import ServingSettings

PRESET = "serving"
#: Options that replace parts of the preset.
_TAKEN = {"policy", "block_size", "requests", "model", "device"}
_COLUMNS = {
    "live_mean_while_others_wait": "live",
    "preempted": "preempted",
    "requests_per_second": "requests/s",
    "tokens_per_second": "tokens/s",
    "tokens_per_cpu_second": "tokens/CPU s",
    "first_token_median": "first token, s",
    "first_token_95": "95 %, s",
}


def read(options: BenchOptions) -> ServingSettings:
    """The settings of a run.

    Raises:
        UserError: an option that the preset does not take, or a transformers release that is not served.
    """
    refuse_others(options, _TAKEN, PRESET, "which makes its requests")
    try:
        check_transformers()
    except UnsupportedTransformersError as error:
        raise UserError(str(error)) from error
    given = {name: getattr(options, name) for name in options.model_fields_set & _TAKEN}
    if "budgets" in options.model_fields_set:
        given["budgets"] = in_tokens(options, PRESET)
    if "model" in given:
        del given["model"]
        given["shape"] = {**SHAPES[a_shape(options, PRESET)], "eos_token_id": None}
    return ServingSettings(**{**given, "device": choose_device(options.device or "cpu", options.model)})


def run(options: BenchOptions, output: Path) -> bool:
    """Measure, show and write; True, since all of it was measured or an error was raised."""
    settings, notes = read(options), Console(stderr=True)
    tell = partial(say, notes)

    def measure() -> dict[str, Any]:
        return {**run_serving(settings, say=tell), "bookkeeping": run_bookkeeping(settings, say=tell)}

    found = measure_once(options, output, settings.device, measure)
    Console().print(to_terminal(table(found["runs"])))
    say(notes, f"written to {output / SUMMARY}")
    return True


def table(runs: dict[str, dict[str, Any]]) -> Table:
    """One line per variant."""
    lines = ((name, *(None if row[key] is None else f"{row[key]:g}" for key in _COLUMNS)) for name, row in runs.items())
    return simple_table("", ("variant", *_COLUMNS.values()), lines)

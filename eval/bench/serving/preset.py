"""`paged-eviction bench --preset serving`: what was typed, measured, shown and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_paged_eviction.serving import UnsupportedTransformersError
from hf_paged_eviction.serving.contract import check_transformers

from ...environment import cpu_name, versions
from ...errors import UserError
from ...options.base import flag
from ...options.bench import BenchOptions
from ...terminal import say
from .answering import run_serving
from .bookkeeping import run_bookkeeping
from .trace import ServingSettings

PRESET = "serving"
#: Options that replace parts of the preset.
_TAKEN = {"budgets", "policy", "block_size", "requests", "threads", "preset", "output", "again"}
SUMMARY = "summary.json"
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
    given = options.model_fields_set
    if others := sorted(given - _TAKEN):
        raise UserError(f"{', '.join(map(flag, others))}: not with --preset {PRESET}, which makes model and requests")
    try:
        check_transformers()
    except UnsupportedTransformersError as error:
        raise UserError(str(error)) from error
    names = given & {"budgets", "policy", "block_size", "requests"}
    return ServingSettings(**{name: getattr(options, name) for name in names})


def run(options: BenchOptions, output: Path) -> bool:
    """Measure, show and write; True, since all of it was measured or an error was raised."""
    settings, notes = read(options), Console(stderr=True)
    target = output / SUMMARY
    if target.exists() and not options.again:
        raise UserError(f"{target} is there already: --again measures anew, --output writes elsewhere")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        found = run_serving(settings, say=lambda text: say(notes, text))
        found["bookkeeping"] = run_bookkeeping(settings, say=lambda text: say(notes, text))
        found["environment"] = environment()
    except ValueError as error:
        raise UserError(str(error)) from error
    finally:
        torch.set_num_threads(before)
    output.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    Console().print(table(found["runs"]))
    say(notes, f"written to {target}")
    return True


def environment() -> dict[str, Any]:
    """Hardware and versions."""
    return {"device": "cpu", "cpu": cpu_name(), "torch_threads": torch.get_num_threads(), **versions()}


def table(runs: dict[str, dict[str, Any]]) -> Table:
    """One line per variant."""
    shown = Table("variant", *_COLUMNS.values())
    for name, row in runs.items():
        shown.add_row(name, *("-" if row[key] is None else f"{row[key]:g}" for key in _COLUMNS))
    return shown

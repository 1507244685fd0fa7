"""What presets with measurements of their own share: options they do not take, threads, one file of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import torch

from ..environment import timed_on
from ..errors import UserError
from ..options.base import flag
from ..options.bench import BenchOptions

SUMMARY = "summary.json"


def refuse_others(options: BenchOptions, taken: Set[str], preset: str, reason: str) -> None:
    """Refuse options that a preset does not take.

    Raises:
        UserError: one of them was given.
    """
    if others := sorted(options.model_fields_set - taken):
        raise UserError(f"{', '.join(map(flag, others))}: not with --preset {preset}, {reason}")


def measure_once(
    options: BenchOptions, output: Path, device: str, measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Measure with as many threads as asked for, and write what was found, the hardware with it.

    Raises:
        UserError: there are results already, or something cannot be measured.
    """
    target, before = output / SUMMARY, torch.get_num_threads()
    if target.exists() and not options.again:
        raise UserError(f"{target} is there already: --again measures anew, --output writes elsewhere")
    torch.set_num_threads(options.threads or before)
    try:
        found = measure()
        written = {**found, "environment": timed_on(device)}
    except ValueError as error:
        raise UserError(str(error)) from error
    finally:
        torch.set_num_threads(before)
    output.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(written, indent=2) + "\n", "utf-8")
    return found

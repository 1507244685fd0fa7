"""What presets with measurements of their own share: options they do not take, threads, one file of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..models.environment import timed_on
from ..options.base import flag
from ..options.bench import BenchOptions
from ..store.results import SUMMARY
from .shapes import SHAPES

#: Options that every preset takes.
_COMMON = {"budgets", "threads", "preset", "output", "again"}


def refuse_others(options: BenchOptions, taken: Set[str], preset: str, reason: str) -> None:
    """Refuse options that a preset does not take, besides those that all take.

    Raises:
        UserError: one of them was given.
    """
    if others := sorted(options.model_fields_set - taken - _COMMON):
        raise UserError(f"{', '.join(map(flag, others))}: not with --preset {preset}, {reason}")


def in_tokens(options: BenchOptions, preset: str) -> tuple[int, ...]:
    """The budgets of a preset that makes its own models.

    Raises:
        UserError: one is in bytes.
    """
    found = tuple(each for each in options.budgets if isinstance(each, int))
    if len(found) < len(options.budgets):
        raise UserError(f"--budgets {','.join(map(str, options.budgets))}: --preset {preset} takes tokens")
    return found


def one_budget(options: BenchOptions, preset: str) -> int:
    """The budget of a preset that takes one.

    Raises:
        UserError: there are several, or it is in bytes.
    """
    (budget, *others) = in_tokens(options, preset)
    if others:
        raise UserError(f"--budgets {','.join(map(str, options.budgets))}: --preset {preset} takes one")
    return budget


def a_shape(options: BenchOptions, preset: str) -> str:
    """The model of a preset that makes it.

    Raises:
        UserError: it would have to be loaded.
    """
    if options.model not in SHAPES:
        raise UserError(f"--model {options.model}: --preset {preset} takes a shape, {', '.join(SHAPES)}")
    return options.model


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads of torch inside this block; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_once(
    options: BenchOptions, output: Path, device: str, measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Measure with as many threads as asked for, and write what was found, the hardware with it.

    Raises:
        UserError: there are results already, or something cannot be measured.
    """
    target = output / SUMMARY
    if target.exists() and not options.again:
        raise UserError(f"{target} is there already: --again measures anew, --output writes elsewhere")
    with threads(options.threads):
        try:
            found = measure()
        except ValueError as error:
            raise UserError(str(error)) from error
        written = {**found, "environment": timed_on(device)}
    output.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(written, indent=2) + "\n", "utf-8")
    return found

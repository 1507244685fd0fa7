"""What was typed, turned into settings, run and shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..errors import UserError
from ..terminal import progress, say
from .goals import COMMANDS, H200
from .plot import plot_steps
from .presets import PAPER, get_preset
from .rows import FAILED, MEASURED, MISSING
from .run import Report, at, list_missing, run_bench
from .settings import BenchSettings, Throughput, check
from .shapes import choose_device
from .table import reasons, tables
from .throughput import VARIANTS_OF_THROUGHPUT
from .variants import KVPRESS, VARIANTS, choose_variants


@dataclass(frozen=True, kw_only=True)
class Typed:
    """The options as typed; None: the default, or what a preset says."""

    preset: str | None = None
    model: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    contexts: str | None = None
    budgets: str | None = None
    batch_sizes: str | None = None
    largest_batch: bool = False
    variants: str | None = None
    policy: str = "paged_eviction"
    block_size: int = 16
    steps: int | None = None
    rounds: int | None = None
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    batch_size: int | None = None


def read(typed: Typed) -> BenchSettings:
    """The settings of a run; its device is still to be looked at.

    Raises:
        UserError: with the way out.
    """
    values = get_preset(typed.preset)
    throughput: Throughput | None = values.get("throughput")
    sizes = {name: getattr(typed, name) for name in ("requests", "input_tokens", "output_tokens", "batch_size")}
    changed = {name: value for name, value in sizes.items() if value is not None}
    if changed and throughput is None:
        wrong = ", ".join("--" + name.replace("_", "-") for name in changed)
        raise UserError(f"{wrong}: about whole answers, say --preset {PAPER}")
    if typed.preset == PAPER:
        _refuse(typed, "contexts", "batch_sizes", "steps", "largest_batch")
        values |= {"throughput": _paper(typed, throughput, changed)}
    elif throughput is not None:
        values["throughput"] = replace(throughput, **changed)
    for name in ("contexts", "budgets", "batch_sizes"):
        if getattr(typed, name) is not None:
            values[name] = numbers(name, getattr(typed, name))
    allowed = VARIANTS_OF_THROUGHPUT if typed.preset == PAPER else tuple(VARIANTS)
    if typed.variants is not None or "variants" not in values:
        values["variants"] = choose_variants(typed.variants, allowed)
    for name in ("model", "steps", "rounds", "device"):
        if getattr(typed, name) is not None:
            values[name] = getattr(typed, name)
    for name in ("policy", "block_size", "dtype", "threads", "largest_batch", "trust_remote_code", "allow_pickle"):
        values[name] = getattr(typed, name)
    wanted = values.pop("device", None)
    settings = BenchSettings(**values)
    settings = replace(settings, device=_device(wanted, settings))
    check(settings)
    return settings


def _device(wanted: str | None, settings: BenchSettings) -> str:
    # What the goals of a GPU need is not measured on anything else.
    return "cuda" if settings.goals == H200 and wanted is None else choose_device(wanted, settings.model)


def _paper(typed: Typed, throughput: Throughput | None, changed: dict[str, int]) -> Throughput:
    found = replace(throughput or Throughput(), **changed)
    if typed.budgets is not None:
        budgets = numbers("budgets", typed.budgets)
        if len(budgets) > 1:
            raise UserError(f"--budgets {typed.budgets}: --preset {PAPER} takes one")
        found = replace(found, budget=budgets[0])
    return found if typed.rounds is None else replace(found, rounds=typed.rounds)


def _refuse(typed: Typed, *names: str) -> None:
    wrong = ["--" + name.replace("_", "-") for name in names if getattr(typed, name)]
    if wrong:
        raise UserError(f"{', '.join(wrong)}: about decode steps, leave it out with --preset {PAPER}")


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers from 1 up, separated by commas, each once, in the order given.

    Raises:
        UserError: something else was written.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise UserError(f"--{name.replace('_', '-')} {text!r}: write whole numbers such as 1024,4096")
    return tuple(dict.fromkeys(map(int, words)))


def run(settings: BenchSettings, output: Path, again: bool, trace: Path | None) -> bool:
    """Measure with a progress bar, show tables, write the plot; whether all that was asked for was measured."""
    notes = Console(stderr=True)
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        reason = "needs a CUDA device, and this machine has none"
        report = list_missing(at(settings, "cpu"), output, reason)
        missing = sum(row["status"] == MISSING for row in report.rows)
        _show(report)
        say(notes, f"nothing is estimated: {missing} rows were not measured ({reason}), and are listed in {output}")
        say(notes, f"on such a machine: {COMMANDS[H200]}")
        return False
    if settings.largest_batch and not settings.device.startswith("cuda"):
        say(notes, "note: --largest-batch is left out: CUDA only")
        settings = replace(settings, largest_batch=False)
    with progress(notes, "measurements") as watch:
        report = run_bench(at(settings, settings.device), output, again, trace, watch)
    _show(report)
    drawn = plot_steps(report.rows, output / "steps.png")
    for note in [*report.notes, *reasons(report.rows)]:
        say(notes, f"note: {note}")
    files: list[Any] = ["results.jsonl", "run_meta.json", "summary.json", *(["steps.png"] if drawn else [])]
    say(notes, f"written to {output}: {', '.join(files)}" + ("" if trace is None else f"; trace: {trace}"))
    return all(_fine(row) for row in report.rows)


def _show(report: Report) -> None:
    for table in tables(report.rows, report.verdicts):
        Console().print(table)


def _fine(row: dict[str, Any]) -> bool:
    """Measured, or no part of this installation."""
    status, variant = row["status"], row["variant"]
    return bool(status == MEASURED or (status != FAILED and variant == KVPRESS))

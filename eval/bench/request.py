"""What was typed, turned into settings, run and shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..caches.making import empty_cache
from ..console import progress, say
from ..errors import UserError
from ..models.loading import load_config
from ..options.base import flag
from ..options.bench import BenchOptions, StepOptions, ThroughputOptions
from ..options.settings import Settings
from ..tables.terminal import to_terminal
from .plot import plot_methods, plot_steps
from .presets import PAPER, PAPER_MODELS, PREFILL, QUICK, get_preset
from .rows import MEASURED, UNAVAILABLE
from .run import at, run_bench
from .settings import BenchSettings, Throughput, check
from .shapes import SHAPES, choose_device, config_of, dtype_of
from .table import reasons, tables
from .throughput import VARIANTS_OF_THROUGHPUT
from .variants import KVPRESS, VARIANTS, choose_variants

#: Options that every preset takes.
_OF_ALL = {"budgets", "threads", "preset", "output", "again"}


def read(options: BenchOptions) -> BenchSettings:
    """The settings of a run; its device is still to be looked at.

    Raises:
        UserError: with the way out.
    """
    if options.quick and options.preset is not None:
        raise UserError(f"--quick is a preset of its own: leave out --preset {options.preset}")
    preset = QUICK if options.quick else options.preset
    values, typed_names = get_preset(preset), options.model_fields_set
    if preset == PREFILL:
        return _read_prefill(options, values)
    throughput: Throughput | None = values.get("throughput")
    changed = {name: getattr(options, name) for name in ThroughputOptions.model_fields if name in typed_names}
    if changed and throughput is None:
        raise UserError(f"{', '.join(map(flag, changed))}: only for whole answers; add --preset {PAPER}")
    typed = {name: getattr(options, name) for name in StepOptions.model_fields if name in typed_names}
    allowed: tuple[str, ...] = VARIANTS
    if options.preset == PAPER:
        if wrong := [flag(name) for name in ("contexts", "batch_sizes", "steps") if name in typed_names]:
            raise UserError(f"{', '.join(wrong)}: only for decode steps; leave it out with --preset {PAPER}")
        changed |= {"budgets": options.budgets} if "budgets" in typed_names else {}
        changed |= {"rounds": options.rounds} if "rounds" in typed_names else {}
        allowed = VARIANTS_OF_THROUGHPUT
    if throughput is not None:
        values["throughput"] = throughput.but(**changed)
    if "variants" in typed_names or "variants" not in values:
        typed["variants"] = choose_variants(options.variants, allowed)
    values |= typed
    wanted, budgets = values.pop("device", None), values.pop("budgets", options.budgets)
    settings = BenchSettings(**values)
    settings = settings.but(device=_device(wanted, settings, options.preset == PAPER))
    settings = settings.but(budgets=_in_tokens(settings, budgets))
    if settings.throughput is not None:
        answers = settings.throughput
        settings = settings.but(throughput=answers.but(budgets=_in_tokens(settings, answers.budgets)))
    check(settings)
    return settings


def _read_prefill(options: BenchOptions, values: dict[str, Any]) -> BenchSettings:
    typed_names = options.model_fields_set
    if others := sorted(typed_names - {"model", "dtype", "device", "contexts", "rounds", *_OF_ALL}):
        raise UserError(
            f"{', '.join(map(flag, others))}: not with --preset {PREFILL}, which compares chunks and policies by itself"
        )
    if options.model not in SHAPES:
        raise UserError(f"--model {options.model}: --preset {PREFILL} takes one of the shapes {', '.join(SHAPES)}")
    if len(options.budgets) > 1 or not isinstance(options.budgets[0], int):
        shown = ",".join(map(str, options.budgets))
        raise UserError(f"--budgets {shown}: --preset {PREFILL} takes one number of tokens")
    typed = {"contexts": ("lengths", options.contexts), "rounds": ("rounds", options.rounds)}
    prefill = values["prefill"].but(**dict(typed[name] for name in typed if name in typed_names))
    own = {name: getattr(options, name) for name in ("model", "dtype", "threads") if name in typed_names}
    settings = BenchSettings(**(values | own | {"prefill": prefill, "budgets": options.budgets}))
    return settings.but(device=choose_device(options.device, settings.model))


def _device(wanted: str | None, settings: BenchSettings, paper: bool) -> str:
    # The paper's shapes are not measured on anything else unasked: it takes days.
    on_a_gpu = paper and settings.model in PAPER_MODELS and wanted is None
    return "cuda" if on_a_gpu else choose_device(wanted, settings.model)


def run_paper(options: BenchOptions, output: Path) -> bool:
    """The preset `paper`: the model that was given, or each of the paper's in a folder of its own."""
    if "model" in options.model_fields_set:
        return run(read(options), output, options.again, options.profile)
    return all(
        [run(read(options.but(model=model)), output / model, options.again, options.profile) for model in PAPER_MODELS]
    )


def run(settings: BenchSettings, output: Path, again: bool, trace: Path | None) -> bool:
    """Measure with a progress bar, show tables, write the plot; whether all that was asked for was measured.

    Raises:
        UserError: there is no such device.
    """
    notes = Console(stderr=True)
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"--preset {PAPER}: {settings.model} is for a CUDA device, and this machine has none. With --device cpu it "
            "takes days. Small enough for a CPU: --model 100m --requests 2 --input-tokens 64 --output-tokens 128 "
            "--budgets 96,128"
        )
    with progress(notes, "measurements", "fewer --contexts, --budgets, --variants or --rounds") as watch:
        report = run_bench(at(settings, settings.device), output, again, trace, watch)
    for table in tables(report.rows, settings.model):
        Console().print(to_terminal(table))
    drawn = [
        name
        for name, draw in {"steps.png": plot_steps, "methods.png": plot_methods}.items()
        if draw(report.rows, output / name)
    ]
    for note in [*report.notes, *reasons(report.rows)]:
        say(notes, f"note: {note}")
    files: list[Any] = ["rows", "settings", "summary.json", *drawn]
    say(notes, f"written to {output}: {', '.join(files)}" + ("" if trace is None else f"; trace: {trace}"))
    # kvpress is no part of every installation.
    return all(
        row["status"] == MEASURED or (row["status"], row["variant"]) == (UNAVAILABLE, KVPRESS) for row in report.rows
    )


def _in_tokens(settings: BenchSettings, budgets: Sequence[int | str]) -> tuple[int, ...]:
    """Budgets in tokens per layer and row. No weights are loaded.

    Raises:
        UserError: one is too small.
    """
    return tuple(dict.fromkeys(_tokens(settings, budget) if isinstance(budget, str) else budget for budget in budgets))


def _tokens(settings: BenchSettings, size: str) -> int:
    shape = settings.model in SHAPES
    loading = None if shape else Settings(**{**settings.common(Settings), "policies": (), "budgets": ()})
    config = (config_of(settings.model) if loading is None else load_config(loading)).get_text_config(decoder=True)
    try:
        dtype = dtype_of(settings.dtype, settings.device, config if loading is not None else None)
        cache = empty_cache(config, dtype, budget=size, policy=settings.policy, **settings.cache_arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"--budgets {size}: {error}") from error
    return cache.budget or 0

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
from ..models.device import check_device
from ..models.environment import best_device
from ..models.loading import load_config
from ..options.base import flag
from ..options.bench import BenchOptions, ThroughputOptions
from ..options.cache import CacheOptions
from ..options.model import Loading
from ..options.settings import Settings
from ..tables.terminal import to_terminal
from .methods import ANSWERING, KVPRESS, VARIANTS
from .plot import plot_methods, plot_steps
from .rows import DECODE, MEASURED, PREFILL, THROUGHPUT, UNAVAILABLE
from .run import on_this_machine, run_bench
from .settings import PAPER, PAPER_MODELS, PRESETS, QUICK, BenchSettings, check
from .shapes import FOR_A_CPU, SHAPES, config_of, dtype_of
from .table import reasons, tables

_CACHES = {"variants", "policy", *CacheOptions.model_fields}
#: Options that are of some measurements only.
_OF = {
    DECODE: {"contexts", "batch_sizes", "steps", *_CACHES},
    THROUGHPUT: {*ThroughputOptions.model_fields, *_CACHES},
    PREFILL: {"contexts"},
}
_WORDS = {DECODE: "decode steps", THROUGHPUT: "whole answers", PREFILL: "the time to the first token"}


def read(options: BenchOptions) -> BenchSettings:
    """The settings of a run; its device is still to be looked at.

    Raises:
        UserError: with the way out.
    """
    if options.quick and options.preset is not None:
        raise UserError(f"--quick is a preset of its own: leave out --preset {options.preset}")
    preset = QUICK if options.quick else options.preset
    values = dict(PRESETS.get(preset or "", {}))
    kinds = values.get("kinds", (DECODE,))
    typed = {name: getattr(options, name) for name in options.model_fields_set & BenchSettings.model_fields.keys()}
    _refuse_unmeasured(typed, kinds)
    wanted, budgets = typed.pop("device", None), typed.pop("budgets", values.get("budgets", options.budgets))
    if kinds == (PREFILL,) and len(budgets) > 1:
        raise UserError(f"--budgets {','.join(map(str, budgets))}: --preset {PREFILL} takes one")
    if "variants" in typed or "variants" not in values:
        typed["variants"] = choose_variants(options.variants, VARIANTS if DECODE in kinds else ANSWERING)
    settings = BenchSettings(**{**values, "budgets": (), **typed})
    # The paper's shapes are not measured on anything else unasked: it takes days.
    on_a_gpu = options.preset == PAPER and settings.model in PAPER_MODELS and wanted is None
    best = "cpu" if settings.model in FOR_A_CPU else best_device()
    settings = settings.but(device="cuda" if on_a_gpu else check_device(wanted or best))
    settings = settings.but(budgets=tuple(dict.fromkeys(_tokens(settings, budget) for budget in budgets)))
    check(settings)
    return settings


def _refuse_unmeasured(typed: dict[str, Any], kinds: Sequence[str]) -> None:
    for name in typed:
        takers = [kind for kind, names in _OF.items() if name in names]
        if takers and not {*takers} & {*kinds}:
            measured = " or ".join(_WORDS[kind] for kind in takers)
            raise UserError(f"{flag(name)}: only for {measured}; see --preset and --quick for what is measured")


def choose_variants(words: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """The variants that are named; "all", or no word, is every one of `allowed`.

    Raises:
        UserError: there is no such variant.
    """
    names = tuple(dict.fromkeys(name for word in words or ("all",) for name in (allowed if word == "all" else (word,))))
    for name in names:
        if name not in allowed:
            raise UserError(f"unknown variant {name} (--variants); choose from {', '.join(allowed)}, all")
    return names


def run_options(options: BenchOptions, output: Path) -> bool:
    """Measure what was typed; the preset `paper` without a model: each of the paper's in a folder of its own."""
    if options.preset != PAPER or "model" in options.model_fields_set:
        return run(read(options), output, options.again)
    return all([run(read(options.but(model=model)), output / model, options.again) for model in PAPER_MODELS])


def run(settings: BenchSettings, output: Path, again: bool) -> bool:
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
        rows, differences = run_bench(on_this_machine(settings), output, again, watch)
    for table in tables(rows, settings.model):
        Console().print(to_terminal(table))
    plots = {"steps.png": plot_steps, "methods.png": plot_methods}
    drawn = [name for name, draw in plots.items() if draw(rows, output / name)]
    for note in [*differences, *reasons(rows)]:
        say(notes, f"note: {note}")
    say(notes, f"written to {output}: {', '.join(['rows', 'settings', 'summary.json', *drawn])}")
    # kvpress is no part of every installation.
    return all(row["status"] == MEASURED or (row["status"], row["variant"]) == (UNAVAILABLE, KVPRESS) for row in rows)


def _tokens(settings: BenchSettings, size: int | str) -> int:
    """A budget in tokens per layer and row. No weights are loaded.

    Raises:
        UserError: it is too small.
    """
    if isinstance(size, int):
        return size
    shape = settings.model in SHAPES
    loading = None if shape else Settings(**{**settings.common(Loading), "policies": (), "budgets": ()})
    config = (config_of(settings.model) if loading is None else load_config(loading)).get_text_config(decoder=True)
    try:
        dtype = dtype_of(settings.dtype, settings.device, config if loading is not None else None)
        cache = empty_cache(config, dtype, budget=size, policy=settings.policy, **settings.cache_arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"--budgets {size}: {error}") from error
    return cache.budget or 0

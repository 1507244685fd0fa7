"""Train the policy `gate:FILE` for a model: what `paged-eviction fit-gate` does."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hf_paged_eviction.gates import save_gates
from hf_paged_eviction.recipes.fit import Window
from hf_paged_eviction.recipes.fit_gates import FittedGates, Training, fit_gates
from hf_paged_eviction.recipes.gate_targets import Target

from . import models
from .calibrate import check_output, cut, longest, token_bar
from .errors import UserError
from .running.prefill import input_device
from .settings import TextSettings
from .texts import documents


def run_fit_gate(
    settings: TextSettings, output: Path, tokens: int, target: Target, units: int, epochs: int, seed: int
) -> FittedGates:
    """Train gates on some texts, write the file, and print how well they foretell.

    Args:
        settings: model, device and texts; `length` is that of a window.
        output: the file to write, `*.safetensors`; samples lie beside it until it is written.
        tokens: how many to read, in all.
        target, units, epochs, seed: see `Training`.

    Raises:
        UserError: the output cannot be written, the texts are too short, or the model has no place for gates.
    """
    notes = Console(stderr=True)
    check_output(output, "gates")
    folder = output.with_suffix(".samples")
    tokenizer = models.load_tokenizer(settings)
    length = min(settings.length, longest(models.load_config(settings)))
    texts = (text.content for text in documents(settings.files, settings.dataset, settings.dataset_revision))
    windows = cut(tokenizer, texts, length, tokens)
    model = models.load(settings)[0]
    placed = [Window(window.tokens.to(input_device(model))) for window in windows]
    read = sum(window.count for window in windows)
    try:
        with token_bar(notes) as bar:
            reading = bar.add_task("reading", total=read)
            fitted = fit_gates(
                model,
                placed,
                Training(target, units, epochs, seed),
                folder=folder,
                progress=lambda count: bar.advance(reading, count),
                layers=lambda found: bar.track(found, description="training layers"),
            )
    except ValueError as error:
        raise UserError(f"cannot train gates for {settings.model!r}: {error}") from error
    save_gates(fitted.gates, output)
    shutil.rmtree(folder)
    Console().print(report_table(fitted))
    notes.print(
        f"{read} tokens in {len(windows)} windows; written to {output}: --policies gate:{output}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return fitted


def report_table(fitted: FittedGates) -> Table:
    """Per layer, how well the gate foretells its target in windows that it was not trained on."""
    table = Table(title="Gates, on text that was held out (mean and worst of the KV heads)")
    for name in ("layer", "Spearman", "worst", "of the best 1/16, found", "worst"):
        table.add_column(name, justify="right")
    for index, report in sorted(fitted.reports.items()):
        numbers = [float(n) for each in (report.spearman, report.found) for n in (each.mean(), each.min())]
        table.add_row(str(index), *(f"{number:.2f}" for number in numbers))
    return table

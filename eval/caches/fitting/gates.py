"""Train the policy `gate:FILE` for a model: what `paged-eviction fit-gate` does."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from hf_paged_eviction.learned.gates import save_gates
from hf_paged_eviction.recipes.fit.gates import FittedGates, Training, fit_gates
from hf_paged_eviction.recipes.procedures.probe import REPEAT

from ...errors import UserError
from ...models.loading import load_tokenizer
from ...options.settings import TextSettings
from ...running.terminal import say
from ...store.summaries.formats import to_terminal
from ...store.summaries.table import Table, simple_table
from .reading import check_output, read_windows, token_bar


def run_fit_gate(settings: TextSettings, output: Path, tokens: int, training: Training) -> FittedGates:
    """Train gates on some texts, write the file, and print how well they do.

    Args:
        settings: model, device and texts; `length` is that of a window.
        output: the file to write, `*.safetensors`; samples lie beside it until it is written.
        tokens: how many to read, in all.
        training: how.

    Raises:
        UserError: the output cannot be written, the texts are too short, or the model has no place for gates.
    """
    notes = Console(stderr=True)
    check_output(output, "gates")
    folder = output.with_suffix(".samples")
    model, windows = read_windows(settings, tokens)
    probe = load_tokenizer(settings).encode(REPEAT, add_special_tokens=False)
    try:
        with token_bar(notes) as bar:
            reading = bar.add_task("reading", total=sum(window.count for window in windows))
            found = fit_gates(
                model,
                windows,
                training,
                probe_ids=probe,
                folder=folder,
                progress=lambda count: bar.advance(reading, count),
                layers=lambda found: bar.track(found, description="training layers"),
            )
    except ValueError as error:
        raise UserError(f"cannot train gates for {settings.model!r}: {error}") from error
    save_gates(found.gates, output)
    shutil.rmtree(folder)
    Console().print(to_terminal(report_table(found)))
    read = sum(window.count for window in windows)
    say(notes, f"{read} tokens in {len(windows)} windows; written to {output}: --policies gate:{output}")
    return found


def report_table(fitted: FittedGates) -> Table:
    """Per layer, how well the gate foretells its target in windows that it was not trained on."""
    names = ("layer", "Spearman", "worst", "of the best 1/16, found", "worst")
    rows = (
        (index, *(float(n) for each in (report.spearman, report.found) for n in (each.mean(), each.min())))
        for index, report in sorted(fitted.reports.items())
    )
    return simple_table("Gates, on text that was held out (mean and worst of the KV heads)", names, rows)

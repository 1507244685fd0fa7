"""Train the policy `gate:FILE` for a model: what `paged-eviction fit-gate` does."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from hf_paged_eviction.internals import REPEAT, Window, split
from hf_paged_eviction_eval.caches.fitting.reading import check_output, read_windows, token_bar
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models.loading import load_tokenizer
from hf_paged_eviction_eval.options.settings import TextSettings
from hf_paged_eviction_eval.running.terminal import say
from hf_paged_eviction_eval.store.summaries.table import Table, simple_table
from hf_paged_eviction_eval.store.summaries.terminal import to_terminal

from ..gates import save_gates
from ..gates.fit import FittedGates, Training, fit_gates
from ..gates.straight_through import StraightThrough, TrainedGates, train_gates

#: Either way of training.
Ways = Training | StraightThrough


def run_fit_gate(settings: TextSettings, output: Path, tokens: int, training: Ways) -> FittedGates | TrainedGates:
    """Train gates on some texts, write the file, and print how well they do.

    Args:
        settings: model, device and texts; `length` is that of a window.
        output: the file to write, `*.safetensors`; samples lie beside it until it is written.
        tokens: how many to read, in all.
        training: how; its class says by which loss.

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
            found = _train(model, windows, training, probe, folder, bar)
    except ValueError as error:
        raise UserError(f"cannot train gates for {settings.model!r}: {error}") from error
    save_gates(found.gates, output)
    shutil.rmtree(folder)
    Console().print(to_terminal(report_table(found) if isinstance(found, FittedGates) else loss_table(found)))
    read = sum(window.count for window in windows)
    say(notes, f"{read} tokens in {len(windows)} windows; written to {output}: --policies gate:{output}")
    return found


def _train(
    model: Any, windows: Sequence[Window], training: Ways, probe: Sequence[int], folder: Path, bar: Progress
) -> FittedGates | TrainedGates:
    if isinstance(training, StraightThrough):
        epoch = sum(window.count for window in split(windows)[0])
        steps = bar.add_task("training", total=epoch * training.epochs)
        return train_gates(model, windows, training, folder=folder, progress=lambda count: bar.advance(steps, count))
    reading = bar.add_task("reading", total=sum(window.count for window in windows))
    return fit_gates(
        model,
        windows,
        training,
        probe_ids=probe,
        folder=folder,
        progress=lambda count: bar.advance(reading, count),
        layers=lambda found: bar.track(found, description="training layers"),
    )


def report_table(fitted: FittedGates) -> Table:
    """Per layer, how well the gate foretells its target in windows that it was not trained on."""
    names = ("layer", "Spearman", "worst", "of the best 1/16, found", "worst")
    rows = (
        (index, *(float(n) for each in (report.spearman, report.found) for n in (each.mean(), each.min())))
        for index, report in sorted(fitted.reports.items())
    )
    return simple_table("Gates, on text that was held out (mean and worst of the KV heads)", names, rows)


def loss_table(trained: TrainedGates) -> Table:
    """What the gates cost the language model in windows that they were not trained on, and how much they keep."""
    report = trained.report
    losses = f"{report.full:.3f} nats per token with the full cache, {report.gated:.3f} with gates"
    rows = ((index, f"{share:.1%}") for index, share in report.kept.items())
    return simple_table("Gates, on text that was held out", ("layer", "kept"), rows, losses)

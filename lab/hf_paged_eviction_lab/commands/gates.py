"""Train the policy `gate:FILE` for a model: what `paged-eviction fit-gate` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from hf_paged_eviction.internals import REPEAT, Window, split
from hf_paged_eviction_eval.console import say, token_bar
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models.loading import load_tokenizer
from hf_paged_eviction_eval.options.files import check_output
from hf_paged_eviction_eval.options.settings import TextSettings

from ..gates import Gates, save_gates
from ..gates.fit import Training, fit_gates
from ..gates.straight_through import StraightThrough, train_gates
from .reading import read_windows

#: Either way of training.
Ways = Training | StraightThrough


def run_fit_gate(settings: TextSettings, output: Path, tokens: int, training: Ways) -> Gates:
    """Train gates on some texts, write the file, and print how well they do.

    Args:
        settings: model, device and texts; `length` is that of a window.
        output: the file to write, `*.safetensors`; samples lie beside it meanwhile.
        tokens: how many to read, in all.
        training: how; its class says by which loss.

    Raises:
        UserError: the output cannot be written, the texts are too short, or the model has no place for gates.
    """
    notes = Console(stderr=True)
    check_output(output, "gates")
    model, windows = read_windows(settings, tokens)
    probe = load_tokenizer(settings).encode(REPEAT, add_special_tokens=False)
    try:
        with token_bar(notes) as bar:
            gates = _train(model, windows, training, probe, output.parent, bar)
    except ValueError as error:
        raise UserError(f"cannot train gates for {settings.model!r}: {error}") from error
    save_gates(gates, output)
    for name, value in gates.facts.items():
        if name.startswith("held_out"):
            say(Console(), f"{name}: {value}")
    read = sum(window.count for window in windows)
    say(notes, f"{read} tokens in {len(windows)} windows; written to {output}: --policies gate:{output}")
    return gates


def _train(
    model: Any, windows: Sequence[Window], training: Ways, probe: Sequence[int], folder: Path, bar: Progress
) -> Gates:
    if isinstance(training, StraightThrough):
        epoch = sum(window.count for window in split(windows)[0])
        steps = bar.add_task("training", total=epoch * training.epochs)
        return train_gates(model, windows, training, lambda count: bar.advance(steps, count))
    reading = bar.add_task("reading", total=sum(window.count for window in windows))
    return fit_gates(
        model,
        windows,
        training,
        probe_ids=probe,
        folder=folder,
        progress=lambda count: bar.advance(reading, count),
        layers=lambda indices: bar.track(indices, description="training layers"),
    )

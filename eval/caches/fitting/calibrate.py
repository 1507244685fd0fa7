"""Fit the policy `calibrated:FILE` to a model: what `paged-eviction calibrate` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from hf_paged_eviction import register_weights
from hf_paged_eviction.learned.calibration import save_calibration, shelf_file
from hf_paged_eviction.naming.of_files import quoted
from hf_paged_eviction.recipes.fit.calibration import Fitted, LayerReport, fit, read_tokens

from ...errors import UserError
from ...options.settings import TextSettings
from ...running.terminal import say
from ...store.summaries.table import Table, simple_table
from ...store.summaries.terminal import to_terminal
from .reading import check_output, read_windows, token_bar


def run_calibrate(settings: TextSettings, output: Path | None, tokens: int) -> Fitted:
    """Calibrate a model on some texts, write the file, and print how well the score foretells attention.

    Args:
        settings: model, device and texts; `length` is that of a window. Without texts, Python's documentation is read.
        output: the file to write, `*.safetensors`; None = where caches find it by the digest of the model's weights.
        tokens: how many to read, in all.

    Raises:
        UserError: the output cannot be written, the texts are too short, or the model has no use for a calibration.
    """
    notes = Console(stderr=True)
    shelved = output is None
    if output is not None:
        check_output(output)
    model, windows = read_windows(settings, tokens)
    output = own_file(model) if output is None else output
    try:
        with token_bar(notes) as bar:
            task = bar.add_task("calibrating", total=read_tokens(windows))
            fitted = fit(model, windows, lambda count: bar.advance(task, count))
    except ValueError as error:
        raise UserError(f"cannot calibrate {settings.model!r}: {error}") from error
    save_calibration(fitted.calibration, output)
    Console().print(to_terminal(report_table(fitted)))
    read = sum(window.count for window in windows)
    how = "caches find it by the model's weights" if shelved else f"--policies calibrated:{quoted(str(output))}"
    say(notes, f"{read} tokens in {len(windows)} windows; written to {output}: {how}")
    if not fitted.calibration.unrotated:
        say(
            notes,
            "note: how this model rotates its keys is not known, so that the score holds for positions within a "
            f"window ({settings.length} tokens): calibrate with --window as long as your prompts",
        )
    return fitted


def own_file(model: Any) -> Path:
    """Where caches find the calibration of a model by the digest of its weights; the folder is made.

    Raises:
        UserError: the folder cannot be made.
    """
    output = shelf_file(register_weights(model))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder of calibrations: {error}; say --output FILE") from error
    return output


def report_table(fitted: Fitted) -> Table:
    """Per layer, correlation with the attention in windows that the score was not fitted to."""
    names = ("layer", "Spearman", "worst", "Pearson", "worst", "best single feature")
    rows = ((index, *_numbers(report), best_single(report)) for index, report in sorted(fitted.reports.items()))
    title = "Score and later attention, on text that was held out (mean and worst of the KV heads)"
    return simple_table(title, names, rows)


def _numbers(report: LayerReport) -> list[float]:
    return [float(value) for each in (report.spearman, report.pearson) for value in (each.mean(), each.min())]


def best_single(report: LayerReport) -> str:
    """The feature that alone says most, and how much."""
    name, value = max(((name, float(value.mean())) for name, value in report.single.items()), key=lambda pair: pair[1])
    return f"{name} {value:.2f}"

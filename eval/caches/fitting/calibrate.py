"""Fit the policy `calibrated:FILE` to a model: what `paged-eviction calibrate` does."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from hf_paged_eviction.learned.calibration import save_calibration, shelf, shelf_name
from hf_paged_eviction.naming.of_files import quoted
from hf_paged_eviction.recipes.fit.calibration import Fitted, LayerReport, fit, read_tokens

from ...errors import UserError
from ...models import loading as models
from ...options.settings import TextSettings
from ...running.terminal import say
from ...store.summaries.formats import to_terminal
from ...store.summaries.table import Table, simple_table
from .reading import check_output, read_windows, token_bar


def run_calibrate(settings: TextSettings, output: Path | None, tokens: int) -> Fitted:
    """Calibrate a model on some texts, write the file, and print how well the score foretells attention.

    Args:
        settings: model, device and texts; `length` is that of a window. Without texts, Python's documentation is read.
        output: the file to write, `*.safetensors`; None = where caches find it by the model's name.
        tokens: how many to read, in all.

    Raises:
        UserError: the output cannot be written, the texts are too short, or the model has no use for a calibration.
    """
    notes = Console(stderr=True)
    found_by_name = output is None
    output = shelf_file(settings) if output is None else output
    check_output(output)
    model, windows = read_windows(settings, tokens)
    try:
        with token_bar(notes) as bar:
            task = bar.add_task("calibrating", total=read_tokens(windows))
            fitted = fit(model, windows, lambda count: bar.advance(task, count))
    except ValueError as error:
        raise UserError(f"cannot calibrate {settings.model!r}: {error}") from error
    save_calibration(fitted.calibration, output)
    Console().print(to_terminal(report_table(fitted)))
    read = sum(window.count for window in windows)
    how = "caches find it by the model's name" if found_by_name else f"--policies calibrated:{quoted(str(output))}"
    say(notes, f"{read} tokens in {len(windows)} windows; written to {output}: {how}")
    if not fitted.calibration.unrotated:
        say(
            notes,
            "note: how this model rotates its keys is not known, so that the score holds for positions within a "
            f"window ({settings.length} tokens): calibrate with --window as long as your prompts",
        )
    return fitted


def shelf_file(settings: TextSettings) -> Path:
    """Where a calibration of this model is found by name; the folder is made.

    Raises:
        UserError: the model has no name, or the folder cannot be made.
    """
    name = shelf_name(models.load_config(settings))
    if name is None:
        raise UserError(f"{settings.model!r} has no name by which its calibration could be found: say --output FILE")
    try:
        shelf().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder of calibrations: {error}; say --output FILE") from error
    return shelf() / name


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

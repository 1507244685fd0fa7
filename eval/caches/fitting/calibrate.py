"""Fit the policy `calibrated:FILE` to a model: what `paged-eviction calibrate` does."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_paged_eviction.learned.calibration import save_calibration, shelf, shelf_name
from hf_paged_eviction.naming.of_files import quoted
from hf_paged_eviction.recipes.fit.calibration import DISTANCE, Fitted, LayerReport, Window, fit, read_tokens

from ...data.texts import documentation, documents
from ...errors import UserError
from ...models import loading as models
from ...options.model import ModelOptions
from ...options.requests import model_settings
from ...options.settings import TextSettings
from ...running.prefill import input_device
from ...running.terminal import say
from ...store.summaries.formats import to_terminal
from ...store.summaries.table import Table, simple_table

#: Windows of a text are at least this long: shorter ones have hardly a token that is far from a later one.
SHORTEST = 4 * DISTANCE


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


def read_windows(settings: TextSettings, tokens: int) -> tuple[Any, list[Window]]:
    """The model, and windows of the texts on its device, no longer than it may read.

    Raises:
        UserError: the texts are too short, or there is no such model.
    """
    tokenizer = models.load_tokenizer(settings)
    length = min(settings.length, longest(models.load_config(settings)))
    texts: Iterable[str] = [documentation()]
    if settings.files or settings.dataset:
        texts = (text.content for text in documents(settings.files, settings.dataset, settings.dataset_revision))
    windows = cut(tokenizer, texts, length, tokens)
    model = models.load_model(settings)
    return model, [Window(window.tokens.to(input_device(model))) for window in windows]


def text_settings(files: Sequence[Path], window: int, options: ModelOptions, *, needed: bool = True) -> TextSettings:
    """What to read with which model.

    Args:
        files: plain texts and JSON lines.
        window: tokens per window.
        needed: there have to be files.

    Raises:
        UserError: no file is given or one does not exist, or the device cannot be used.
    """
    if needed and not files:
        raise UserError("no text given to calibrate on: --text FILE...")
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UserError(f"no such file: {', '.join(missing)}")
    return TextSettings(**model_settings(options).model_dump() | {"files": tuple(map(str, files)), "length": window})


def check_output(output: Path, what: str = "a calibration") -> None:
    """Refuse, before anything is computed, a file that could not be written."""
    if output.suffix != ".safetensors":
        raise UserError(f"--output {output}: the name of {what} ends in .safetensors")
    if output.is_dir() or not output.parent.is_dir():
        raise UserError(f"--output {output}: {output if output.is_dir() else output.parent} is no place for a file")


def longest(config: Any) -> int:
    """Tokens that a model may read."""
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else sys.maxsize


def cut(tokenizer: Any, texts: Iterable[str], length: int, tokens: int) -> list[Window]:
    """Windows of texts, one after the other, each with what the tokenizer puts before a text.

    Reads no more texts than it takes. What is left of a text at its end is a window of its own, if it is long enough.

    Raises:
        UserError: there are fewer than two windows in it.
    """
    start = list(tokenizer("")["input_ids"])
    start = start if start and start[-1] != tokenizer.eos_token_id else []
    step = length - len(start)
    if step < SHORTEST:
        raise UserError(f"a window of {length} tokens is too short to calibrate on: at least {SHORTEST + len(start)}")
    windows: list[Window] = []
    left = tokens
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for place in range(0, len(ids), step):
            part = ids[place : place + min(step, left)]
            if len(part) >= SHORTEST:
                windows.append(Window(torch.tensor([start + part])))
                left -= len(part)
        if left < SHORTEST:
            break
    if len(windows) < 2:
        found = sum(window.count for window in windows)
        raise UserError(
            f"too little text to calibrate on: {found} tokens in {len(windows)} windows, at least two are needed "
            f"(texts shorter than {SHORTEST} tokens do not count); give more or longer files, or a higher --tokens"
        )
    return windows


def token_bar(console: Console) -> Progress:
    """Progress in tokens."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


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

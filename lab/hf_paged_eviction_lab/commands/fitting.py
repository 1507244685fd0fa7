"""Read texts, fit something to a model, write the file: what all commands of the lab do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hf_paged_eviction.internals import DISTANCE, documentation
from hf_paged_eviction_eval.console import say, token_bar
from hf_paged_eviction_eval.data.texts import read_texts
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models import loading as models
from hf_paged_eviction_eval.models.device import input_device, model_settings
from hf_paged_eviction_eval.options.files import check_files, check_output

from ..fitted import Progress

#: Windows of a text are at least this long: shorter ones have hardly a token that is far from a later one.
SHORTEST = 4 * DISTANCE


def run_fit(
    options: Any,
    what: str,
    fit: Callable[[Any, Any, list[Tensor], Progress], Any],
    save: Callable[[Any, Path], None],
    usage: str,
) -> Any:
    """Fit to a model, and print how well.

    Args:
        options: `FitOptions` with `ModelOptions`.
        what: is fitted, in messages.
        fit: gets the model, the tokenizer, and windows of the texts on the model's device.
        usage: how to use the file.

    Raises:
        UserError: the output cannot be written, the texts are too short, or the model cannot be used.
    """
    notes, files = Console(stderr=True), options.text or []
    check_output(options.output)
    check_files(files)
    settings = model_settings(options)
    tokenizer = models.load_tokenizer(settings)
    longest = getattr(models.load_config(settings).get_text_config(decoder=True), "max_position_embeddings", None)
    length = min(options.window, longest or sys.maxsize)
    texts = [text.content for text in read_texts(list(map(str, files)))] if files else [documentation()]
    windows = cut(tokenizer, texts, length, options.tokens)
    model = models.load_model(settings)
    windows = [window.to(input_device(model)) for window in windows]
    try:
        with token_bar(notes, "steps") as bar:
            task = bar.add_task("fitting", total=1)
            fitted = fit(model, tokenizer, windows, lambda done, of: bar.update(task, completed=done, total=of))
    except ValueError as error:
        raise UserError(f"cannot fit {what} to {settings.model!r}: {error}") from error
    save(fitted, options.output)
    for name, value in fitted.facts.items():
        if value.startswith("{"):
            say(Console(), f"{name}: {value}")
    read = sum(window.numel() for window in windows)
    say(notes, f"{read} tokens in {len(windows)} windows; written to {options.output}: {usage}")
    return fitted


def cut(tokenizer: Any, texts: Iterable[str], length: int, tokens: int) -> list[Tensor]:
    """Windows of texts, one after the other, each with what the tokenizer puts before a text.

    Reads no more texts than it takes. What is left of a text at its end is a window of its own, if it is long enough.

    Raises:
        UserError: there are fewer than two windows in it.
    """
    start = list(tokenizer("")["input_ids"])
    start = start if start and start[-1] != tokenizer.eos_token_id else []
    step = length - len(start)
    if step < SHORTEST:
        raise UserError(f"a window of {length} tokens is too short to fit to: at least {SHORTEST + len(start)}")
    windows: list[Tensor] = []
    left = tokens
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for place in range(0, len(ids), step):
            part = ids[place : place + min(step, left)]
            if len(part) >= SHORTEST:
                windows.append(torch.tensor([start + part]))
                left -= len(part)
        if left < SHORTEST:
            break
    if len(windows) < 2:
        raise UserError(
            f"too little text to fit to: {len(windows)} windows, at least two are needed (texts shorter than "
            f"{SHORTEST} tokens do not count); give more or longer files, or a higher --tokens"
        )
    return windows

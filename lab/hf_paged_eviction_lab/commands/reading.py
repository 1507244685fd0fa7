"""What is read to fit something to a model, and where that is written."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_paged_eviction.internals import DISTANCE, Window, documentation
from hf_paged_eviction_eval.data.texts import documents
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models import loading as models
from hf_paged_eviction_eval.models.device import input_device, model_settings
from hf_paged_eviction_eval.options.files import check_files
from hf_paged_eviction_eval.options.model import ModelOptions
from hf_paged_eviction_eval.options.settings import TextSettings

#: Windows of a text are at least this long: shorter ones have hardly a token that is far from a later one.
SHORTEST = 4 * DISTANCE


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
    check_files(files)
    return TextSettings(**model_settings(options).model_dump() | {"files": tuple(map(str, files)), "length": window})


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
        total = sum(window.count for window in windows)
        raise UserError(
            f"too little text to calibrate on: {total} tokens in {len(windows)} windows, at least two are needed "
            f"(texts shorter than {SHORTEST} tokens do not count); give more or longer files, or a higher --tokens"
        )
    return windows

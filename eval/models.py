"""Load the model and the tokenizer that a run names."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from .errors import UserError
from .settings import EMBEDDED, Settings

_EXPECTED = "expected: a folder that exists, or a name on the Hugging Face Hub and a network"


def load(settings: Settings) -> tuple[Any, Any]:
    """The model, in evaluation mode on its device, and its tokenizer."""
    dtype = resolve_dtype(settings)
    # Its bars would be drawn over the progress of the run.
    disable_progress_bar()
    try:
        if settings.model == EMBEDDED:
            from . import embedded

            # The shipped file is half precision to be small, not to be computed in.
            exact = dtype if isinstance(dtype, torch.dtype) else torch.float32
            model, tokenizer = embedded.load(dtype=exact)
        else:
            model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
            tokenizer = load_tokenizer(settings)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the model {settings.model!r} ({_EXPECTED}): {error}") from error
    return model.to(settings.device).eval(), tokenizer


def load_tokenizer(settings: Settings) -> Any:
    """The tokenizer alone."""
    source = settings.tokenizer or settings.model
    try:
        if source == EMBEDDED:
            from . import embedded

            source = str(embedded.path())
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load a tokenizer from {source!r} ({_EXPECTED}): {error}") from error


def resolve_dtype(settings: Settings) -> torch.dtype | str:
    """`auto` is float32 on a CPU and the checkpoint's own precision elsewhere."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)  # type: ignore[no-any-return]
    return torch.float32 if settings.device == "cpu" else "auto"

"""Models that are one GGUF file: transformers reads weights, configuration and tokenizer from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import is_gguf_available

from ..errors import UserError

_SUFFIX = ".gguf"


def is_gguf(name: str) -> bool:
    """Whether the name of a model, or of a tokenizer, is that of a GGUF file."""
    return name.lower().endswith(_SUFFIX)


def gguf_arguments(name: str) -> dict[str, Any]:
    """What `from_pretrained` is told besides the folder; nothing for a model of another kind.

    Raises:
        UserError: there is no such file, or the package that reads it is missing.
    """
    if not is_gguf(name):
        return {}
    if not Path(name).is_file():
        raise UserError(f"cannot load {name!r}: there is no such file")
    # One that is missing and one that is too old are the same to transformers.
    if not is_gguf_available():
        raise UserError(f"cannot load {name!r}: gguf is needed: pip install 'hf_paged_eviction[gguf]'")
    return {"gguf_file": Path(name).name}


def forget_gguf(model: Any) -> None:
    """Make a model that was read from such a file an ordinary one: its weights are, and it can then be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    if hasattr(model, "quantization_method"):
        del model.quantization_method

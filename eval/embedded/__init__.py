"""A small language model that ships with the package, so that the harness runs without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def path() -> Path:
    """The folder of the model, in the form that `from_pretrained` takes."""
    return Path(__file__).parent / "model"


def calibration_path() -> Path:
    """The profile that was fitted to this model, with scores and without measurements; `--profile embedded`."""
    return path() / "calibration.safetensors"


def load(dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa") -> tuple[Any, Any]:
    """The model, ready to generate, and its tokenizer (which pads on the left)."""
    model = AutoModelForCausalLM.from_pretrained(
        path(),
        dtype=dtype,
        attn_implementation=attn_implementation,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    return model.eval(), AutoTokenizer.from_pretrained(path(), local_files_only=True, trust_remote_code=False)


__all__ = ["calibration_path", "load", "path"]

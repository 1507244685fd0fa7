"""A small language model that ships with the package, so that the harness runs without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged_eviction.lab.fold import name_kernels
from hf_paged_eviction.learned.calibration import name_calibration
from hf_paged_eviction.learned.gates import name_gates


def path() -> Path:
    """The folder of the model, in the form that `from_pretrained` takes."""
    return Path(__file__).parent / "model"


def calibration_path() -> Path:
    """The file of `policy="calibrated:embedded"`, the scorer that was fitted to this model."""
    return path() / "calibration.safetensors"


def gates_path() -> Path:
    """The file of `policy="gate:embedded"`, the gates that were trained for this model."""
    return path() / "gates.safetensors"


def kernels_path() -> Path:
    """The file of `disposal="fold:embedded"`, fitted to this model and the policy "keydiff"."""
    return path() / "fold.safetensors"


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


name_calibration("embedded", calibration_path())
name_gates("embedded", gates_path())
name_kernels("embedded", kernels_path())

__all__ = ["calibration_path", "gates_path", "kernels_path", "load", "path"]

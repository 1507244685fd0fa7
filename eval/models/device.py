"""Where a model runs."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UserError, reason
from ..options.model import EMBEDDED, ModelOptions
from ..options.settings import Settings
from .environment import best_device

#: What allocators say (CUDA, Metal, the CPU's on Linux and macOS, the CPU's on Windows, cuBLAS), and the system.
_OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    "Cannot allocate memory",
)
#: What `--device` names, with a number behind it or without ("cuda:1").
_KINDS = ("cuda", "cpu", "mps")


def model_settings(options: ModelOptions) -> Settings:
    """Which model runs where, without a cache.

    Raises:
        UserError: the device cannot be used, or the model has no such tokenizer or revision.
    """
    values = {**options.common(Settings), "device": device_for(options), "policies": (), "budgets": ("full",)}
    return Settings(**values)


def device_for(options: ModelOptions) -> str:
    """The device that was named; else the accelerator if there is one, and the CPU for the embedded model."""
    if options.model != EMBEDDED:
        return check_device(options.device or best_device())
    for name in ("tokenizer", "revision"):
        if getattr(options, name):
            raise UserError(f"the embedded model has its own {name}: leave out --{name}, or name a --model")
    return check_device(options.device or "cpu")


def check_device(name: str) -> str:
    """The name, if torch can run there.

    Raises:
        UserError: it cannot, or there is no such device.
    """
    kind = name.partition(":")[0]
    try:
        torch.empty(0, device=name)
        if kind == "meta":
            raise RuntimeError("it has no memory")
    except (RuntimeError, AssertionError, ImportError) as error:  # torch asserts when it was built without CUDA
        why = reason(error) if kind in _KINDS else "write cuda, cpu or mps"
        raise UserError(f"device {name!r} cannot be used: {why}") from error
    return name


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator raised this."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(words in str(error) for words in _OUT_OF_MEMORY)


def input_device(model: Any) -> torch.device:
    """Where the model, split or not, takes its tokens."""
    device: torch.device = model.get_input_embeddings().weight.device
    # Weights that are loaded when they are needed have no place; their hooks move what they are given.
    return torch.device("cpu") if device.type == "meta" else device

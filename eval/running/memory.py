"""Running out of memory, on whatever device."""

from __future__ import annotations

import gc

import torch

#: What allocators say (CUDA, Metal, the CPU's on Linux and macOS, the CPU's on Windows, cuBLAS).
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator raised this."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def free_memory() -> None:
    """Hand back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()

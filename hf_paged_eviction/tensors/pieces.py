"""The size of temporary tensors."""

import torch

_ON_CPU, _ELSEWHERE = 16 * 2**20, 64 * 2**20


def piece_bytes(device: torch.device) -> int:
    """Largest size of a temporary tensor in bytes; what takes more is computed in pieces.

    On a GPU smaller pieces are more calls. On a CPU, glibc hands tensors of 32 MiB and more back to the system each
    time, whose next use of the memory costs more than the computation.
    """
    return _ON_CPU if device.type == "cpu" else _ELSEWHERE

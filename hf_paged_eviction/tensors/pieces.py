"""The size of temporary tensors."""

from collections import defaultdict

import torch

#: Largest size of a temporary tensor in bytes, by type of device; what takes more is computed in pieces. On a GPU
#: smaller pieces are more calls. On a CPU, glibc hands tensors of 32 MiB and more back to the system each time, and to
#: use new memory of the system costs more than the computation.
PIECE_BYTES: defaultdict[str, int] = defaultdict(lambda: 64 * 2**20, cpu=16 * 2**20)


def per_piece(device: torch.device, numbers: int) -> int:
    """How many times so many float32 numbers fit into a piece; at least once."""
    return max(1, PIECE_BYTES[device.type] // (4 * max(numbers, 1)))

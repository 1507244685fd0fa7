"""The size of temporary tensors."""

from collections import defaultdict

#: Largest size of a temporary tensor in bytes, by type of device; what takes more is computed in pieces. On a GPU
#: smaller pieces are more calls. On a CPU, glibc hands tensors of 32 MiB and more back to the system each time, and to
#: use new memory of the system costs more than the computation.
PIECE_BYTES: defaultdict[str, int] = defaultdict(lambda: 64 * 2**20, cpu=16 * 2**20)

"""Decoding on a CPU by one function in C, see `cpu.library`."""

import ctypes

from torch import Tensor

from ..cpu.library import library

_POINTERS = "codes levels turn sizes means frequencies signs scalings positions starts lengths output"
_NUMBERS = "sets heads together dim bits stored held room set_slots statistics pairs pair_step pair_offset still"


class _Decode(ctypes.Structure):
    """`Decode` of `attend.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
    ]


def decode(
    output: Tensor,
    held: int,
    codes: Tensor,
    levels: Tensor,
    positions: Tensor | None,
    bounds: tuple[Tensor | None, Tensor | None],
    bits: int,
    turn: Tensor,
    statistics: tuple[Tensor, Tensor] | None,
    turning: tuple[list[Tensor], list[int]] | None,
) -> None:
    """Decode the first slots of a layer to float32.

    Args:
        output: `[rows, heads, held or more, dim]` float32, contiguous.
        codes, levels: columns, contiguous.
        positions: their column; None = the mean does not turn.
        bounds: see `Segments`; None = slots lie side by side.
        turn: see `Codec.turn`.
        statistics: sizes and means, views of one tensor each, `[rows, heads, 1, dim]`; None = not centred.
        turning: see `Rotary.of_channels`.

    Raises:
        RuntimeError: the function is `missing`.
    """
    rows, heads, room, dim = output.shape
    frequencies: list[Tensor | None] = [None] * 3
    layout = [0, 1, 0, 0]
    if turning is not None:
        frequencies[:], layout = turning
    together = heads if bounds[0] is None and positions is not None and positions.shape[1] == 1 else 1
    sizes, means = statistics or (None, None)
    tensors = codes, levels, turn, sizes, means, *frequencies, positions, *bounds, output
    call = _Decode(
        *(None if part is None else part.data_ptr() for part in tensors),
        *(rows * heads, heads, together, dim, bits, codes.shape[-1], held, room),
        *(0 if bounds[0] is not None else codes.shape[2], 0 if sizes is None else sizes.stride(1), *layout),
    )
    library().decode(ctypes.byref(call))

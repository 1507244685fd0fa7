"""Decoding on a CPU by one function in C, see `cpu.library`."""

import ctypes

import torch
from torch import Tensor

from ..cpu.library import library
from ..store.exact import RowStatistics
from .codec import Codec

_POINTERS = "codes levels turn sizes means frequencies signs scalings positions starts lengths output"
_NUMBERS = "sets heads together dim bits stored held room set_slots statistics pairs pair_step pair_offset still"


class _Decode(ctypes.Structure):
    """`Decode` of `attend.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
    ]


class Decoder:
    """Decodes the first slots of keys or values to float32. It is valid as long as no tensor is replaced; what is
    written to them counts.

    Args:
        codec: in few bits, with mixed channels.
        codes, levels, positions: columns, contiguous.
        statistics: of the rows.
        bounds: see `Segments`, contiguous; None = slots lie side by side.
        like: `[rows, heads, ..., dim]`, what is decoded is like this.

    Raises:
        RuntimeError: the function is `missing`.
    """

    def __init__(
        self,
        codec: Codec,
        codes: Tensor,
        levels: Tensor,
        positions: Tensor,
        statistics: RowStatistics,
        bounds: tuple[Tensor, Tensor] | None,
        like: Tensor,
    ) -> None:
        self._like, (rows, heads, *_, dim) = like, like.shape
        turn = codec.turn(dim, torch.float32, like.device)
        turning: list[Tensor | None] = [None] * 3
        layout, places, together = [0, 1, 0, 0], None, 1
        if codec.rotary is not None:
            turning[:], layout = codec.rotary.of_channels(like.device)
            places, together = positions, heads if bounds is None and positions.shape[1] == 1 else 1
        sizes, means = (statistics.sizes, statistics.mean) if codec.centred else (None, None)
        self._kept = codes, levels, turn, sizes, means, *turning, places, *(bounds or (None, None))
        slots, step = 0 if bounds else codes.shape[2], 0 if sizes is None else sizes.stride(1)
        self._call = _Decode(
            *[None if part is None else part.data_ptr() for part in self._kept],
            None,
            *(rows * heads, heads, together, dim, codec.bits, codes.shape[-1], 0, 0, slots, step, *layout),
        )
        self._decode, self._at = library().decode, ctypes.byref(self._call)

    def __call__(self, held: int) -> Tensor:
        """The first `held` slots, `[rows, heads, held, dim]`; zeros beyond the end of a segment."""
        like, call = self._like, self._call
        output = like.new_empty(*like.shape[:2], held, like.shape[-1])
        call.output, call.held, call.room = output.data_ptr(), held, held
        self._decode(self._at)
        return output

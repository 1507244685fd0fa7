"""Attention to codes on a CPU by one function in C (`attend.c`), if a C compiler is at hand.

With operators of torch, an eager step costs what its many small operators cost. The function is compiled when a process
first needs it, which takes about a second. Nothing stays on disk.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from .codec import packed_width
from .launching import WARPS, Sizes, of_mask, output_shape

_SOURCE = Path(__file__).with_name("attend.c")
#: Sums may be taken in any order; numbers that are infinite or none stay what they are.
_FLAGS = (
    "-std=gnu11 -O3 -shared -fPIC -ffp-contract=fast "
    "-fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"
).split()
#: What compilers may lack, most wanted first.
_EXTRAS: tuple[list[str], ...] = ["-march=native", "-fopenmp"], ["-march=native"], ["-fopenmp"], []
#: A compiler that takes so long does not answer.
_SECONDS = 60

_POINTERS = (
    "query keys values means sizes key_turn value_turn frequencies signs scalings sinks bias "
    "shown key_codes value_codes key_levels value_levels positions places starts lengths records scratch output"
).split()
_NUMBERS = (
    "sets heads group together place_count key_dim value_dim key_bits value_bits key_stored value_stored "
    "slots set_slots mask_row mask_head mask_slot pairs pair_step pair_offset still"
).split()


class _Call(ctypes.Structure):
    """`Call` of `attend.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scaling", ctypes.c_double),
        ("softcap", ctypes.c_double),
    ]


#: Masks, which the function reads by their strides.
_BY_STRIDES = ("shown", "bias")
#: Types of the tensors of `_Call`, where it is not float32.
_TYPES = {
    "shown": torch.uint8,
    "key_codes": torch.uint8,
    "value_codes": torch.uint8,
    "key_levels": torch.bfloat16,
    "value_levels": torch.bfloat16,
    "positions": torch.int32,
    "places": torch.int64,
    "starts": torch.int64,
    "lengths": torch.int64,
    "records": torch.int64,
}


def missing() -> str | None:
    """Why there is no function; None = there is one. Compiles it at the first call."""
    return reason if isinstance(reason := _library(), str) else None


@cache
def _library() -> ctypes.CDLL | str:
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
        if shutil.which(compiler[0]) is None:
            return "there is no C compiler (set CC, or put cc on the path)"
        with TemporaryDirectory() as folder:
            return _compiled(compiler, Path(folder) / "attend.so")
    except Exception as error:  # whatever a compiler, a folder, or a library that is none may raise
        return _refused(f"{type(error).__name__}: {error}")


def _compiled(compiler: list[str], target: Path) -> ctypes.CDLL | str:
    for extras in _EXTRAS:
        words = [*compiler, *_FLAGS, *extras, str(_SOURCE), "-o", str(target), "-lm"]
        ran = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS)
        if ran.returncode == 0:
            library = ctypes.CDLL(str(target))
            library.scratch_size.restype = ctypes.c_int64
            library.attend.restype = library.attend_plain.restype = library.decode.restype = None
            return library
    return _refused(ran.stderr.decode("utf-8", "replace").strip()[-500:])


def _refused(reason: str) -> str:
    warnings.warn(
        f"Attention to few bits could not be compiled, so operators of torch do it, in more time: {reason}",
        stacklevel=2,
    )
    return f"the C compiler refused: {reason}"


def launch(
    query: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    columns: list[Tensor],
    exact: list[Tensor],
    bounds: list[Tensor | None],
    turns: list[Tensor | None],
    turning: list[Tensor | None],
    layout: list[int],
    bits: list[int],
    slots: int,
    set_slots: int,
    scaling: float,
    softcap: float | None,
    records: Tensor | None = None,
) -> Tensor:
    """See `launching.launch`; both keys and values are in few bits, and their channels mixed.

    Args:
        records: `[rows, heads, slots]` int64, how many bytes lie before the codes and levels of each slot. The columns
            of codes and levels are then memory, `[bytes or halves of two]`, from the first part of its kind on.

    Raises:
        RuntimeError: the function is `missing`.
        ValueError: keys or values are not in few bits, or not mixed, or of too many channels; or there is not one sink
            per query head.
        TypeError: a tensor is of a type, or on a device, that the function does not read.
    """
    mask_as = _as_floats_or_bytes(mask)
    mask, *strides = of_mask(mask_as, query, slots).values()
    call = Prepared(
        query, mask, strides, sinks, columns, exact, bounds, turns, turning, layout, bits, slots, set_slots, scaling,
        softcap, records,
    )
    return call(query)


def _as_floats_or_bytes(mask: Tensor | None) -> Tensor | None:
    """Before it is expanded, which would change its strides."""
    return mask if mask is None or mask.dtype == torch.bool else mask.float()


class Prepared:
    """A `_Call` whose tensors are filled in, for any number of queries like this one: only the addresses of queries and
    output change. It is valid as long as no tensor is replaced; what is written to them counts.

    Args:
        query, mask, strides: mask and its strides as `of_mask` makes them.
        sinks: and the others as in `launch`.
    """

    def __init__(
        self,
        query: Tensor,
        mask: Tensor | None,
        strides: list[int],
        sinks: Tensor | None,
        columns: list[Tensor],
        exact: list[Tensor],
        bounds: list[Tensor | None],
        turns: list[Tensor | None],
        turning: list[Tensor | None],
        layout: list[int],
        bits: list[int],
        slots: int,
        set_slots: int,
        scaling: float,
        softcap: float | None,
        records: Tensor | None = None,
    ) -> None:
        if not all(bits) or None in turns:
            raise ValueError(f"Attention in C reads keys and values in few bits, with mixed channels; they have {bits}.")
        if isinstance(library := _library(), str):
            raise RuntimeError(f"Attention in C cannot run: {library}.")
        sizes = Sizes.of(query, columns, exact, bounds, slots)
        if max(sizes.key_dim, sizes.value_dim) > max(WARPS):
            raise ValueError(f"Attention in C reads heads of at most {max(WARPS)} channels.")
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise ValueError(
                f"There must be one sink for each of {query.shape[1]} query heads, got {list(sinks.shape)}."
            )
        key_codes, key_levels, value_codes, value_levels, positions = columns
        shown, bias = (mask, None) if mask is not None and mask.dtype == torch.uint8 else (None, mask)
        given = (*exact[1:], *turns, *turning, sinks, bias)
        floats = [part if part is None else part.float() for part in given]
        codes = key_codes, value_codes, key_levels, value_levels, positions if positions.shape[-1] else None
        names = _POINTERS[1 : -len(("scratch", "output"))]
        # They are kept as long as the call.
        self._kept = [_readable(*pair) for pair in zip(names, (*floats, shown, *codes, exact[0], *bounds, records), strict=True)]
        # What had to be converted is converted again for each query.
        self._converted = [
            (copy, part) for copy, part in zip(self._kept, given, strict=False)
            if part is not None and copy is not None and part.dtype != copy.dtype
        ]
        self._call = call = _Call(
            None,
            *(None if part is None else part.data_ptr() for part in self._kept),
            None,
            None,
            *(sizes.sets, sizes.heads, sizes.group, sizes.together, sizes.places, sizes.key_dim, sizes.value_dim, *bits),
            *(*map(packed_width, (sizes.key_dim, sizes.value_dim), bits), slots, set_slots, *strides, *layout),
            scaling,
            softcap or 0.0,
        )
        self._scratch = query.new_empty(library.scratch_size(ctypes.byref(call)), dtype=torch.float32)
        call.scratch = self._scratch.data_ptr()
        self._attend, self._at = library.attend, ctypes.byref(call)
        self._shape, self._dtype, self._fresh = output_shape(query, exact), query.dtype, True

    def __call__(self, query: Tensor) -> Tensor:
        if self._fresh:
            self._fresh = False
        else:
            for copy, part in self._converted:
                copy.copy_(part)
        wide = query if self._dtype == torch.float32 else query.float()
        wide = wide.contiguous()
        output = wide.new_empty(self._shape)
        call = self._call
        call.query, call.output = wide.data_ptr(), output.data_ptr()
        self._attend(self._at)
        return output if self._dtype == torch.float32 else output.to(self._dtype)


class _Decode(ctypes.Structure):
    """`Decode` of `attend.c`."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "codes levels turn sizes means frequencies signs scalings positions starts lengths output"
            ).split()
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "sets heads together dim bits stored held room set_slots statistics pairs pair_step pair_offset still"
            ).split()
        ),
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
    """
    if isinstance(library := _library(), str):
        raise RuntimeError(f"Decoding in C cannot run: {library}.")
    rows, heads, room, dim = output.shape
    frequencies, layout = turning or ([None] * 3, [0, 1, 0, 0])
    together = heads if bounds[0] is None and positions is not None and positions.shape[1] == 1 else 1
    sizes, means = statistics or (None, None)
    tensors = codes, levels, turn, sizes, means, *frequencies, positions, *bounds, output
    call = _Decode(
        *(None if part is None else part.data_ptr() for part in tensors),
        *(rows * heads, heads, together, dim, bits, codes.shape[-1], held, room),
        *(0 if bounds[0] is not None else codes.shape[2], 0 if sizes is None else sizes.stride(1), *layout),
    )
    library.decode(ctypes.byref(call))


class _Plain(ctypes.Structure):
    """`Plain` of `attend.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "starts", "lengths", "output")),
        *((name, ctypes.c_int64) for name in ("sets", "group", "key_dim", "value_dim", "narrow")),
        ("scaling", ctypes.c_double),
    ]


class PreparedPlain:
    """Attention of single queries to segments of keys and values as they came, as `Prepared`.

    Args:
        query: `[rows, query_heads, 1, dim]`, such as will come.
        keys, values: `[total, dim]`, float32 or bfloat16, contiguous, of the dtype of the queries.
        bounds: see `Segments`, contiguous.
        scaling: of logits.
    """

    def __init__(
        self, query: Tensor, keys: Tensor, values: Tensor, bounds: tuple[Tensor, Tensor], scaling: float
    ) -> None:
        if isinstance(library := _library(), str):
            raise RuntimeError(f"Attention in C cannot run: {library}.")
        sets, self._kept = bounds[0].numel(), (keys, values, *bounds)
        pointers = None, *(part.data_ptr() for part in self._kept), None
        narrow, dims = keys.dtype == torch.bfloat16, (keys.shape[-1], values.shape[-1])
        self._call = _Plain(*pointers, sets, query.shape[0] * query.shape[1] // sets, *dims, narrow, scaling)
        self._attend, self._at = library.attend_plain, ctypes.byref(self._call)
        self._shape, self._dtype = (query.shape[0], 1, query.shape[1], dims[1]), query.dtype

    def __call__(self, query: Tensor) -> Tensor:
        """Attention of these queries, `[rows, 1, query_heads, dim]`."""
        wide = query if self._dtype == torch.float32 else query.float()
        wide = wide.contiguous()
        output, call = wide.new_empty(self._shape), self._call
        call.query, call.output = wide.data_ptr(), output.data_ptr()
        self._attend(self._at)
        return output if self._dtype == torch.float32 else output.to(self._dtype)


def _readable(name: str, tensor: Tensor | None) -> Tensor | None:
    """The tensor, of which the function gets the address alone, as it reads it: contiguous, but masks by strides."""
    if tensor is None:
        return None
    if tensor.dtype != _TYPES.get(name, torch.float32) or not tensor.is_cpu:
        raise TypeError(f"Attention in C cannot read {name} of the type {tensor.dtype} on {tensor.device}.")
    return tensor if name in _BY_STRIDES else tensor.contiguous()

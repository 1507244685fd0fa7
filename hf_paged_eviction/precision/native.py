"""Attention to codes on a CPU by one function in C, see `cpu.library`."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..cpu.library import library, missing
from .codec import packed_width
from .launching import WARPS, Arguments, Sizes, of_mask

__all__ = ["Prepared", "launch", "missing"]

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


class Prepared:
    """A call of the function whose tensors are filled in, for any number of queries like this one: only the addresses
    of queries and output change. It is valid as long as no tensor is replaced; what is written to them counts.

    Args:
        given: query, such as will come, and the others; both keys and values are in few bits, their channels mixed.

    Raises:
        RuntimeError: the function is `missing`.
        ValueError: keys or values are not in few bits, or not mixed, or of too many channels; or there is not one sink
            per query head.
        TypeError: a tensor is of a type, or on a device, that the function does not read.
    """

    def __init__(self, given: Arguments) -> None:
        query, sinks, bits = given.query, given.sinks, given.bits
        if not all(bits) or None in given.turns:
            raise ValueError(
                f"Attention in C reads keys and values in few bits, with mixed channels; they have {bits}."
            )
        functions = library()
        sizes = Sizes.of(given)
        if max(sizes.key_dim, sizes.value_dim) > max(WARPS):
            raise ValueError(f"Attention in C reads heads of at most {max(WARPS)} channels.")
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise ValueError(
                f"There must be one sink for each of {query.shape[1]} query heads, got {list(sinks.shape)}."
            )
        mask = given.mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.float()  # before it is expanded, which would change its strides
        mask, *strides = of_mask(mask, query, given.slots).values()
        self._keep(given, mask)
        dims, reach = (sizes.key_dim, sizes.value_dim), (given.slots, given.set_slots)
        numbers = *sizes.of_c, *dims, *bits, *map(packed_width, dims, bits), *reach, *strides, *given.layout
        addresses = [None if part is None else part.data_ptr() for part in self._kept]
        scales = given.scaling, given.softcap or 0.0
        self._call = call = _Call(None, *addresses, None, None, *numbers, *scales)
        call.slots = given.set_slots  # for `hold`
        self._scratch = query.new_empty(functions.scratch_size(ctypes.byref(call)), dtype=torch.float32)
        call.slots = given.slots
        call.scratch = self._scratch.data_ptr()
        self._attend, self._at = functions.attend, ctypes.byref(call)
        self._shape, self._dtype = (query.shape[0], 1, query.shape[1], sizes.value_dim), query.dtype
        self._fresh = True

    def _keep(self, given: Arguments, mask: Tensor | None) -> None:
        """Keep the tensors as long as the call, in the order of `_POINTERS`, and those that had to be converted to
        float32, which happens again for each query."""
        shown, bias = (mask, None) if mask is not None and mask.dtype == torch.uint8 else (None, mask)
        key_codes, key_levels, value_codes, value_levels, positions = given.columns
        codes = key_codes, value_codes, key_levels, value_levels, positions if positions.shape[-1] else None
        places, *states = given.exact
        floats = *states, *given.turns, *given.turning, given.sinks, bias
        wide = [None if part is None else part.float() for part in floats]
        tensors = *wide, shown, *codes, places, *given.bounds, given.records
        names = _POINTERS[1 : -len(("scratch", "output"))]
        # As the function reads them, which gets their addresses alone: contiguous, but masks by strides.
        self._kept: list[Tensor | None] = []
        for name, part in zip(names, tensors, strict=True):
            if part is not None and (part.dtype != _TYPES.get(name, torch.float32) or not part.is_cpu):
                raise TypeError(f"Attention in C cannot read {name} of the type {part.dtype} on {part.device}.")
            self._kept.append(part if part is None or name in _BY_STRIDES else part.contiguous())
        self._converted = [
            (copy, part)
            for copy, part in zip(self._kept, floats, strict=False)
            if part is not None and copy is not None and part.dtype != copy.dtype
        ]

    def hold(self, slots: int) -> None:
        """Read so many slots from now on, at most `set_slots`. Not with a mask, nor where bounds say how many."""
        self._call.slots = slots

    def __call__(self, query: Tensor) -> Tensor:
        """Attention of these queries, `[rows, 1, query_heads, dim]`."""
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


def launch(*arguments: Any) -> Tensor:
    """`launching.launch` on a CPU."""
    given = Arguments(*arguments)
    return Prepared(given)(given.query)

"""Attention on codes by two Triton kernels (`kernel`), if they can run."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..attention.weights import Logits
from .codec import Codec
from .in_codes import InCodes

#: The oldest release that compiles the kernels.
_TRITON = (3, 6)
#: Channels of a head; how many slots are read at a time then, how many such steps at once, and by how many warps. Every
#: device from 8.0 on has shared memory for that.
_SLOTS = {64: (64, 3, 2), 128: (32, 2, 4), 256: (16, 1, 4)}
#: Places of tokens that are not rounded, and channels that are mixed, at a time.
_STEPS = {"place_step": 32, "mixed_step": 32}
#: So many sums of parts are joined at a time, one for each part and query head.
_PIECES = 64
#: Products of matrices have as many rows and columns at least.
_TILE = 16
#: Tiles of codes have as many columns at least: products with fewer are wrong in Triton 3.6.
_WIDTH = 32
#: There are as many parts as give each multiprocessor so many programs, if there are slots for that.
_PROGRAMS = 4


def attend(held: InCodes, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
    """Attention of one query per row to codes, by the kernels where they can read them; see `InCodes.read`.

    Args:
        mask: see `InCodes.read`; None = all are visible, or those that `InCodes.visible` names.
    """
    if mask is None and held.visible is not None:
        mask = held.visible.repeat_interleave(query.shape[1] // held.visible.shape[1], 1)[:, :, None]
    return (read if obstacle(held, query) is None else InCodes.read)(held, query, mask, logits)


def obstacle(held: InCodes, query: Tensor) -> str | None:
    """Why the kernels cannot read these codes, so that torch operators have to; None = they can."""
    if torch.compiler.is_compiling():
        return "a compiler fuses the operators of torch"
    if (reason := _missing(query.device)) is not None:
        return reason
    if query.dtype == torch.float64:
        return "the kernels compute in float32"
    if query.requires_grad and torch.is_grad_enabled():
        return "the kernels have no gradient"
    if any(type(codec) is not Codec for codec in held.codecs):
        return "codes are of another package"
    if max(query.shape[-1], held.dim) > max(_SLOTS):
        return f"the kernels read heads of at most {max(_SLOTS)} channels"
    rotary = held.codecs[0].rotary
    if rotary is not None and rotary.in_pairs(query.device) is None:
        return "channels do not turn in halves or by turns"
    return None


@cache
def _missing(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return "the kernels need CUDA"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need a device of compute capability 8.0 or later"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    import triton

    return None if tuple(map(int, triton.__version__.split(".")[:2])) >= _TRITON else "triton is older than 3.6"


def read(held: InCodes, query: Tensor, mask: Tensor | None, logits: Logits) -> Tensor:
    """See `InCodes.read`; the result has the dtype of the queries."""
    from . import kernel

    exact, value_codec = held.exact, held.codecs[1]
    (rows, heads, places), (_, query_heads, _, key_dim) = exact.slots.shape, query.shape
    sets, group, slots, value_dim = rows * heads, query_heads // heads, held.slots, held.dim
    slot_step, stages, warps = next(steps for dim, steps in _SLOTS.items() if max(key_dim, value_dim) <= dim)
    part_slots = _part_slots(sets, slots, slot_step, query.device)
    parts = -(-slots // part_slots)
    output = query.new_empty((rows, 1, query_heads, value_dim))
    both = {
        "query": query.contiguous(),
        "places": exact.slots.contiguous(),
        **_of_mask(mask, rows, query_heads, slots),
        "sums": query.new_empty(sets * parts * group * (value_dim + 2), dtype=torch.float32),
        "scaling": logits.scaling,
        "softcap": logits.softcap,
        **_sizes(heads, group, places, key_dim, value_dim),
        "value_bits": value_codec.bits or 0,
    }
    with torch.cuda.device_of(query):
        kernel.read_part[sets, parts](
            **both,
            **_of_codes(held, query.device),
            slots=slots,
            set_slots=held.columns.shape[2],
            part_slots=part_slots,
            slot_step=slot_step,
            precise=query.dtype == torch.float32,
            num_stages=stages,
            num_warps=warps,
        )
        kernel.join_parts[(sets,)](
            **both,
            keys=exact.keys.contiguous(),
            values=exact.values.contiguous(),
            value_turn=_turn(value_codec, value_dim, query.device),
            sinks=logits.sinks,
            parts=parts,
            output=output,
            piece_step=_PIECES,
        )
    return output


@cache
def _sizes(heads: int, group: int, places: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """What both kernels are compiled for."""
    return {
        "heads": heads,
        "group": group,
        "place_count": places,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "rows": _tile(group),
        "key_width": _tile(key_dim, _WIDTH),
        "value_width": _tile(value_dim, _WIDTH),
        **_STEPS,
    }


def _of_codes(held: InCodes, device: torch.device) -> dict[str, Any]:
    (codec, _), columns, exact = held.codecs, held.columns, held.exact
    starts, lengths = columns.bounds or (None, None)
    turning = None if codec.rotary is None else codec.rotary.in_pairs(device)
    (frequencies, signs, scalings), layout = turning or ((None, None, None), (0, 1, 0, 0))
    pairs, pair_step, pair_offset, still = layout
    names = "key_codes", "key_levels", "value_codes", "value_levels", "positions"
    return {
        **{name: columns[name].contiguous() for name in names},
        "means": exact.means.contiguous(),
        "sizes": exact.sizes.contiguous(),
        "key_turn": _turn(codec, exact.keys.shape[-1], device),
        "frequencies": frequencies,
        "signs": signs,
        "scalings": scalings,
        "pairs": pairs,
        "pair_step": pair_step,
        "pair_offset": pair_offset,
        "pair_width": _tile(pairs),
        "still": still,
        "starts": starts,
        "lengths": lengths,
        "shared": starts is None and columns["positions"].shape[1] == 1,
        "key_bits": codec.bits or 0,
        "key_stored": columns["key_codes"].shape[-1],
        "value_stored": columns["value_codes"].shape[-1],
    }


def _of_mask(mask: Tensor | None, rows: int, heads: int, slots: int) -> dict[str, Any]:
    if mask is None:
        return {"mask": None, "mask_row": 0, "mask_head": 0, "mask_slot": 0}
    mask = mask[:, :, 0, :slots].expand(rows, heads, slots)
    row, head, slot = mask.stride()
    numbers = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return {"mask": numbers, "mask_row": row, "mask_head": head, "mask_slot": slot}


def _turn(codec: Codec, dim: int, device: torch.device) -> Tensor | None:
    return codec.turn(dim, torch.float32, device) if codec.turned else None


def _tile(size: int, least: int = _TILE) -> int:
    """The power of two that holds so many."""
    return int(max(least, 1 << (size - 1).bit_length()))


def _part_slots(sets: int, slots: int, slot_step: int, device: torch.device) -> int:
    """How many slots one program of the first kernel reads."""
    parts = -(-_PROGRAMS * _processors(device) // sets)
    return max(1, -(-slots // (parts * slot_step))) * slot_step


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

"""Launches the three Triton kernels that attend to codes."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Channels of a head, and how many warps read `_SLOTS` slots at a time then.
WARPS, _SLOTS = {128: 1, 256: 2}, 32
#: Slots whose products with the mean key are computed at a time, and by how many warps.
_ALIKE = (64, 2)
#: Places of tokens that are not rounded, and channels mixed at a time: before, and of so many behind.
_PLACES, _MIXED, _MIXED_BACK = 32, 32, {128: 64, 256: 32}
#: So many sums of parts are joined at a time, one for each part and query head.
_PIECES = 64
#: Tiles of matrices have as many columns at least, and as many rows where columns are slots.
_TILE, _LEAST = 16, 8
#: There are as many parts as give each multiprocessor so many programs, if there are slots for that: a part has so many
#: slots at least. Of a row and KV head so many parts can be joined in little time.
_PROGRAMS, _PART, _PARTS = 16, 64, 64
#: In so many parts queries and weights are multiplied with levels, which have no more than 8 bits.
_PASSES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


class Arguments(NamedTuple):
    """Of one call; contiguous tensors, but for the mask.

    Attributes:
        query: `[rows, query_heads, 1, dim]`.
        mask: see `InCodes.read`.
        sinks: see `Logits`.
        columns: codes and levels of keys, those of values, and positions, see `FewBits`.
        exact: slots, keys, values, means and sizes of `Exact`.
        bounds: see `Segments`; None = slots lie side by side.
        turns: of keys and values, see `Codec.turn`; None = channels are not mixed.
        turning, layout: see `Rotary.of_channels`; None = no channel turns.
        bits: of keys and of values; 0 = they are not in few bits.
        set_slots: of a row and KV head; `slots` of them are read.
        scaling, softcap: see `Logits`.
        records: in C alone, `[rows, heads, slots]` int64, how many bytes lie before the codes and levels of each slot.
            The columns of codes and levels are then memory, `[bytes or halves of two]`, from the first part of its kind
            on.
    """

    query: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    columns: list[Tensor]
    exact: list[Tensor]
    bounds: list[Tensor | None]
    turns: list[Tensor | None]
    turning: list[Tensor | None]
    layout: list[int]
    bits: list[int]
    slots: int
    set_slots: int
    scaling: float
    softcap: float | None
    records: Tensor | None = None


#: Of the operator that compiled code calls, without `records`.
SCHEMA = (
    "(Tensor query, Tensor? mask, Tensor? sinks, Tensor[] columns, Tensor[] exact, Tensor?[] bounds, Tensor?[] turns, "
    "Tensor?[] turning, SymInt[] layout, SymInt[] bits, SymInt slots, SymInt set_slots, float scaling, float? softcap) "
    "-> Tensor"
)


class Sizes(NamedTuple):
    """Of one call; `sets` are the KV heads of all rows, `together` those that have the same positions, and `passes` as
    in `_PASSES`."""

    sets: int
    heads: int
    group: int
    places: int
    key_dim: int
    value_dim: int
    slots: int
    together: int
    passes: int

    @classmethod
    def of(cls, call: Arguments) -> "Sizes":
        """From these arguments."""
        (rows, heads, places), (_, query_heads, _, key_dim) = call.exact[0].shape, call.query.shape
        together = heads if call.bounds[0] is None and call.columns[4].shape[1] == 1 else 1
        dims, passes = (key_dim, call.exact[2].shape[-1]), _PASSES[call.query.dtype]
        return cls(rows * heads, heads, query_heads // heads, places, *dims, call.slots, together, passes)

    @property
    def of_c(self) -> tuple[int, ...]:
        """Those that the function in C is told first."""
        return self.sets, self.heads, self.group, self.together, self.places

    @property
    def fixed(self) -> dict[str, int]:
        """Those that all kernels are compiled for."""
        return {"heads": self.heads, "group": self.group, "key_dim": self.key_dim, "value_dim": self.value_dim}


def launch(*arguments: Any) -> Tensor:
    """The three kernels, one after the other, of `Arguments`."""
    call = Arguments(*arguments)
    sizes, bounds = Sizes.of(call), call.bounds
    of_slots = {"starts": bounds[0], "lengths": bounds[1], "slots": call.slots, "set_slots": call.set_slots}
    for_logits = {**of_mask(call.mask, call.query, call.slots), "scaling": call.scaling, "softcap": call.softcap}
    of_keys = {
        "key_turn": call.turns[0],
        **dict(zip(("frequencies", "signs", "scalings"), call.turning, strict=True)),
        **dict(zip(("pairs", "pair_step", "pair_offset", "still"), call.layout, strict=True)),
    }
    with torch.cuda.device_of(call.query):
        alike, mixed = _prepare(sizes, call, {**of_slots, **of_keys})
        sums, parts = _read_parts(sizes, call, alike, mixed, {**of_slots, **for_logits})
        return _join_parts(sizes, call, sums, parts, for_logits)


def _prepare(sizes: Sizes, call: Arguments, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The first kernel: `alike` and `mixed`."""
    query, key_codes, sets, group, together = call.query, call.columns[0], sizes.sets, sizes.group, sizes.together
    part_slots = _part_slots(sets // together, sizes.slots, query.device)
    parts = -(-sizes.slots // part_slots)
    side_by_side = arguments["starts"] is None
    numbers = sets * sizes.slots if side_by_side else key_codes.numel() // key_codes.shape[-1]
    alike = query.new_empty(numbers * group, dtype=torch.float32)
    mixed = torch.empty_like(query, dtype=torch.float32) if call.bits[0] else query
    _kernels().prepare[sets // together, parts + together](
        query=query,
        places=call.exact[0],
        means=call.exact[3],
        sizes=call.exact[4],
        positions=call.columns[4],
        alike=alike,
        mixed=mixed,
        **arguments,
        **sizes.fixed,
        parts=parts,
        part_slots=part_slots,
        together=together,
        place_count=sizes.places,
        key_bits=call.bits[0],
        pair_width=_tile(arguments["pairs"]),
        queries=_tile(together * group, _LEAST),
        head_rows=_tile(group),
        channel_width=_tile(sizes.key_dim),
        place_width=_tile(together * sizes.places),
        slot_step=_ALIKE[0],
        mixed_step=_MIXED,
        precise=sizes.passes > 2,
        num_warps=_ALIKE[1],
    )
    return alike, mixed


def _read_parts(
    sizes: Sizes, call: Arguments, alike: Tensor, mixed: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, int]:
    """The second kernel: `sums`, and of how many parts."""
    sets, slots, bits = sizes.sets, sizes.slots, call.bits
    key_codes, key_levels, value_codes, value_levels, _ = call.columns
    part_slots = max(_part_slots(sets, slots, mixed.device), -(-slots // (_PARTS * _PART)) * _PART)
    parts = -(-slots // part_slots)
    sums = alike.new_empty(sets * parts * sizes.group * (sizes.value_dim + 2))
    _kernels().read_part[sets, parts](
        mixed=mixed,
        alike=alike,
        key_codes=key_codes,
        key_levels=key_levels,
        value_codes=value_codes,
        value_levels=value_levels,
        sums=sums,
        **arguments,
        **sizes.fixed,
        part_slots=part_slots,
        key_bits=bits[0],
        value_bits=bits[1],
        rows=_tile(sizes.group, _LEAST),
        key_width=_plane(bits[0], sizes.key_dim),
        value_width=_plane(bits[1], sizes.value_dim),
        slot_step=_SLOTS,
        key_stored=key_codes.shape[-1],
        value_stored=value_codes.shape[-1],
        passes=sizes.passes,
        num_stages=1,
        num_warps=_of_dim(WARPS, max(sizes.key_dim, sizes.value_dim)),
    )
    return sums, parts


def _join_parts(sizes: Sizes, call: Arguments, sums: Tensor, parts: int, arguments: dict[str, Any]) -> Tensor:
    """The third kernel: the output."""
    output = output_of(call.query, call.exact)
    _kernels().join_parts[(sizes.sets,)](
        query=call.query,
        places=call.exact[0],
        keys=call.exact[1],
        values=call.exact[2],
        sinks=call.sinks,
        sums=sums,
        output=output,
        value_turn=call.turns[1],
        **arguments,
        **sizes.fixed,
        parts=parts,
        place_count=sizes.places,
        value_bits=call.bits[1],
        rows=_tile(sizes.group),
        key_width=_tile(sizes.key_dim),
        value_width=_tile(sizes.value_dim),
        place_step=_PLACES,
        mixed_step=_of_dim(_MIXED_BACK, sizes.value_dim),
        piece_step=_PIECES,
        num_stages=1,
    )
    return output


def _kernels() -> Any:
    from . import kernels  # needs Triton

    return kernels


def output_of(query: Tensor, exact: list[Tensor]) -> Tensor:
    """`[batch, 1, query_heads, dim]`, to be written."""
    return query.new_empty(query.shape[0], 1, query.shape[1], exact[2].shape[-1])


def _plane(bits: int, dim: int) -> int:
    """Columns of a tile of codes: a byte, or a number."""
    return _tile(-(-dim // _kernels().plane_count(bits)))


def _of_dim(numbers: dict[int, int], dim: int) -> int:
    return next(number for most, number in numbers.items() if dim <= most)


def of_mask(mask: Tensor | None, query: Tensor, slots: int) -> dict[str, Any]:
    """A mask, bytes if it is bool, and the distances of its rows, heads and slots."""
    if mask is None:
        return {"mask": None, "mask_row": 0, "mask_head": 0, "mask_slot": 0}
    mask = mask[:, :, 0, :slots].expand(*query.shape[:2], slots)
    row, head, slot = mask.stride()
    numbers = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return {"mask": numbers, "mask_row": row, "mask_head": head, "mask_slot": slot}


def _tile(size: int, least: int = _TILE) -> int:
    """The power of two that holds so many."""
    return int(max(least, 1 << (size - 1).bit_length()))


def _part_slots(sets: int, slots: int, device: torch.device) -> int:
    """How many slots one program reads, where so many sets are read."""
    parts = -(-_PROGRAMS * _processors(device) // sets)
    return max(1, -(-slots // (parts * _PART))) * _PART


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

"""A store that keeps tokens in few bits."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from ..attention.in_place import carry
from ..parts import map_tensors, split_rows
from ..saved import SavedState, StateDict
from ..store.columns import Columns, States, gather_slots, no_mask, slot_index
from ..store.room import Room
from ..store.store import Arrived, Store
from ..store.tensors import byte_count
from . import fused
from .codec import LEVELS, Codec, Codes, RowStatistics, fuses
from .exact import Exact, Newest
from .in_codes import InCodes

_POSITIONS = torch.int32
#: Columns of keys and of values.
_CODES = ("key_codes", "key_levels"), ("value_codes", "value_levels")
#: This many protected first tokens are not rounded, because models attend to them more than to any others. On SmolLM2
#: more of them change nothing; rounding them too costs three times as much as rounding all other tokens.
FIRST = 4
#: Rows x KV heads x slots: up to this number, decoding is faster in eager mode than reading codes by torch operators.
FEW = 768


class CodedStore(Store):
    """Stores tokens as codes. Every token is encoded once; later operations move or overwrite its codes.

    The first `FIRST` tokens of a row (if they are protected) and its newest `block_size` tokens are not rounded, as
    long as they are held. The choice depends only on the real tokens of the row, not on the batch. So a single token is
    first stored without rounding, and the layer calls `encode` when a whole block has come.

    If the mean that a codec subtracts depends on the position, the positions of the tokens are stored with their codes.

    Args:
        codecs: codecs of keys and of values.
        block_size, protected: number of tokens per block, and of protected tokens.
        fixed: whether all tensors keep their addresses, for compiled steps.
        separate: whether each KV head holds its own tokens.
        columns: see `Store`.
    """

    rounds = True

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        block_size: int,
        protected: int,
        fixed: bool = False,
        separate: bool = False,
        columns: Callable[[Room], Columns] = Columns,
    ) -> None:
        super().__init__(None, fixed, columns)
        self.room.zeroed = True  # hidden slots are also decoded
        self._separate = separate or not self.columns.pads
        self._codecs = codecs
        self._newest, self._first = block_size, min(protected, FIRST)
        self._exact: Exact | None = None
        self.uncoded = 0

    # ---- what there is --------------------------------------------------------------------------------------------

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """The codecs of keys and of values."""
        return self._codecs

    @property
    def exact(self) -> Exact:
        """The tokens that are not rounded."""
        if self._exact is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self._exact

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes and levels, `[batch, kv_heads, slots, ...]`, and positions, `[batch, sets, slots, 0 or 1]`."""
        if not self.columns.tensors:
            raise RuntimeError("The cache is empty: run a forward first.")
        return tuple(self.columns.tensors.values())

    @property
    def bytes(self) -> int:
        """Bytes of all slots, used or not, and of the tokens that are not rounded, with their places."""
        return sum(self.bytes_by_part.values())

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """See `Store.bytes_by_part`."""
        if not self.columns.tensors:
            return {}
        columns = self.columns
        return {
            "codes": byte_count(columns["key_codes"], columns["value_codes"]),
            "levels": byte_count(columns["key_levels"], columns["value_levels"]),
            "positions": byte_count(columns["positions"]),
            "tokens as they came": byte_count(*self.exact.tensors()),
        }

    def token_bytes(self, keys: Tensor, values: Tensor) -> int:
        """See `Store.token_bytes`."""
        total = 0
        for codec, like in zip(self._codecs, (keys, values), strict=True):
            packed, levels = codec.shapes(like, 1)
            total += prod(packed) * codec.packed_dtype(like.dtype).itemsize + prod(levels) * 2
        total += prod(self._positions_shape(keys, 1)) * _POSITIONS.itemsize
        return total

    def _positions_shape(self, keys: Tensor, slots: int) -> tuple[int, int, int, int]:
        rotates = any(codec.rotary is not None for codec in self._codecs)
        return keys.shape[0], keys.shape[1] if self._separate else 1, slots, int(rotates)

    def fixed_bytes(self, keys: Tensor, values: Tensor) -> int:
        """See `Store.fixed_bytes`."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self._exact_shapes(keys, values))

    def exact_like(self, keys: Tensor, values: Tensor) -> Exact:
        """What is not rounded, in rows of states like these, `[batch, kv_heads, n, dim]`; nothing so far."""
        parts = [self.room.make(shape, dtype, keys.device) for shape, dtype in self._exact_shapes(keys, values)]
        return Exact(self._newest, *parts)

    def _exact_shapes(self, keys: Tensor, values: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Of the fields of `Exact`."""
        rows, heads = keys.shape[:2]
        places, numbers = (rows, heads, self._newest + self._first), torch.int64
        like = (rows, heads, 1, keys.shape[-1] + values.shape[-1]), keys.dtype
        return [
            ((*places, keys.shape[-1]), keys.dtype),
            ((*places, values.shape[-1]), values.dtype),
            (places, numbers),
            ((rows,), numbers),
            ((rows,), numbers),
            like,
            like,
            ((rows,), numbers),
        ]

    # ---- room -----------------------------------------------------------------------------------------------------

    def start(self, keys: Tensor, values: Tensor, least: int, most: int) -> None:
        """See `Store.start`."""
        if not self._serves(keys, values, least, most):
            self.make(keys, values, least)
        self.uncoded = 0
        self.exact.clear()

    def _serves(self, keys: Tensor, values: Tensor, least: int, most: int) -> bool:
        if not self.columns.tensors or not least <= self.slots <= most:
            return False
        pairs = zip((self.exact.keys, self.exact.values), (keys, values), strict=True)
        return all(
            (held.dtype, held.device, _without_slots(held)) == (new.dtype, new.device, _without_slots(new))
            for held, new in pairs
        )

    def make(self, keys: Tensor, values: Tensor, slots: int) -> None:
        """See `Store.make`."""
        self.give_up()
        self.columns.use(self._new_codes(keys, values, slots))
        for codec in self._codecs:
            if codec.rotary is not None:
                codec.rotary.prepare(keys.device)
        fused.prepare(keys.device)
        self._exact = self.exact_like(keys, values)

    def _new_codes(self, keys: Tensor, values: Tensor, slots: int) -> dict[str, Tensor]:
        tensors = {}
        for (codes, levels), codec, like in zip(_CODES, self._codecs, (keys, values), strict=True):
            packed, steps = codec.shapes(like, slots)
            tensors[codes] = self.room.make(packed, codec.packed_dtype(like.dtype), like.device)
            tensors[levels] = self.room.make(steps, LEVELS, like.device)
        tensors["positions"] = self.room.make(self._positions_shape(keys, slots), _POSITIONS, keys.device)
        return tensors

    def give_up(self) -> None:
        """See `Store.give_up`."""
        self._exact = None
        super().give_up()

    # ---- codes ----------------------------------------------------------------------------------------------------

    def _encode(
        self, keys: Tensor, values: Tensor, positions: Tensor, statistics: tuple[RowStatistics, RowStatistics]
    ) -> dict[str, Tensor]:
        """Encode tokens at these positions `[batch, 1 or kv_heads, n]`; returns the columns of codes."""
        tensors = {}
        parts = zip(_CODES, self._codecs, (keys, values), statistics, strict=True)
        for (codes, levels), codec, states, row_statistics in parts:
            encoded = codec.encode(states, row_statistics, positions[..., None])
            tensors[codes], tensors[levels] = encoded.packed, encoded.levels
        rows, sets, _, width = self._positions_shape(keys, 1)
        placed = positions[:, :sets].expand(rows, sets, -1)[..., None][..., :width]
        return {**tensors, "positions": placed.to(_POSITIONS)}

    def _decode(self, columns: States) -> tuple[Tensor, Tensor]:
        exact = self.exact
        parts = zip(_CODES, self._codecs, (exact.keys, exact.values), exact.row_statistics(), strict=True)
        keys, values = (
            codec.decode(
                Codes(columns[codes], columns[levels]), like.shape[-1], like.dtype, row_statistics, columns["positions"]
            )
            for (codes, levels), codec, like, row_statistics in parts
        )
        return keys, values

    def newest(self) -> Newest:
        """See `Exact.newest_tokens`."""
        return self.exact.newest_tokens()

    def encode(self, together: "Sequence[CodedStore]" = ()) -> list[Newest]:
        """Write the codes of the single tokens that are not encoded yet.

        Args:
            together: further stores whose tokens are encoded in the same operations, see `encodes_like`.

        Returns:
            The newest tokens of this store and of the others, as they were before.
        """
        stores = [self, *together]
        exact = self.exact if not together else map_tensors(_one_behind_the_other, *(store.exact for store in stores))
        all_new = exact.newest_tokens()
        columns = self._encode(all_new.keys, all_new.values, all_new.positions, exact.row_statistics())
        rows = self.exact.slots.shape[0]
        newest = split_rows(all_new, rows)
        for at, (store, new) in enumerate(zip(stores, newest, strict=True)):
            own = {name: states[at * rows : (at + 1) * rows] for name, states in columns.items()}
            store.columns.overwrite(new.slots, own, new.waits)
            store.exact.all_coded()
            store.uncoded = 0
        return newest

    def encodes_like(self, other: "CodedStore") -> bool:
        """Whether tokens of both stores can be encoded in the same operations."""
        alike = all(mine.alike(its) for mine, its in zip(self._codecs, other._codecs, strict=True))
        return alike and all(
            (mine.shape, mine.dtype, mine.device) == (its.shape, its.dtype, its.device)
            for mine, its in zip(self.exact.tensors(), other.exact.tensors(), strict=True)
        )

    # ---- what attention reads -------------------------------------------------------------------------------------

    def carrier(
        self, keys: Tensor, held: int | None = None, visible: Callable[[], Tensor | None] = no_mask
    ) -> Tensor | None:
        """See `Store.carrier`; None for latents, which attention on codes does not support, and where it would be
        slower."""
        coded, values = self._codecs
        readable = coded.readable and values.readable and not values.centred
        few = prod(self.columns["key_codes"].shape[:-1]) < FEW
        if not readable or (few and not fuses() and not fused.available(keys.device)):
            return None
        return carry(keys, partial(fused.attend, InCodes(self._codecs, self.columns, self.exact, held, visible())))

    def shown(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """See `Store.shown`."""
        return self.read(held)

    def shown_before(self, held: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Store.shown_before`."""
        read, old = self.read(held), self.exact.oldest(real)
        codes = self._encode(old.keys, old.values, old.positions, self.exact.row_statistics())
        few = self._decode(codes)  # they may not be written yet
        for states, rounded in zip(read, few, strict=True):
            index = slot_index(old.slots, states)
            states.scatter_(2, index, torch.where(old.waits[..., None], rounded, states.gather(2, index)))
        return read

    # ---- reading --------------------------------------------------------------------------------------------------

    def read(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """See `Store.read`; decodes at each call."""
        keys, values = self._decode(self.columns.first(held))
        if held != 0 and self._exact is not None:
            self._exact.write_over(keys, values)
        return keys, values

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `Store.at`."""
        keys, values = self._decode(self.columns.at(slots))
        return self.exact.instead(slots, keys, values)

    def meet(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """See `Store.meet`."""
        self.exact.meet(self._codecs, (keys, values), real)

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def append(self, start: int, keys: Tensor, values: Tensor, arrived: Arrived | None = None) -> None:
        """See `Store.append`; `arrived` is needed for several tokens."""
        if arrived is None:
            raise RuntimeError("Several tokens come with their positions.")
        positions = arrived.new.clamp_min(0)  # the position of a pad may be anything
        new = self._encode(keys, values, positions, self.exact.row_statistics())
        self.columns.append(start, new)

        def states(slots: Tensor) -> tuple[Tensor, Tensor]:
            new, (held_k, held_v) = (slots >= start)[..., None], self.at(slots.clamp_max(max(start - 1, 0)))
            place = (slots - start).clamp_min(0)
            return (
                torch.where(new, gather_slots(keys, place), held_k),
                torch.where(new, gather_slots(values, place), held_v),
            )

        self.exact.find(arrived.positions, arrived.count, states)

    def overwrite(self, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """See `Store.overwrite`. `encode` must be called after at most `block_size` tokens."""
        self.exact.put(slot[..., 0], keys, values, real)
        self.exact.counted(real)
        self.uncoded += 1

    def write(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `Store.write`; the host counts in `wrote`."""
        keys, values = self.detached(keys, values)
        self.exact.put(slot, keys, values, None)

    def wrote(self) -> None:
        """See `Store.wrote`."""
        self.exact.counted(None)
        self.uncoded += 1

    def keep(
        self, keys: Tensor, values: Tensor, kept_indices: Tensor, held: int, arrived: Arrived, views: bool
    ) -> None:
        """See `Store.keep`; only new tokens are encoded."""
        positions = arrived.new.clamp_min(0)
        new = self._encode(keys[:, :, held:], values[:, :, held:], positions, self.exact.row_statistics())
        old = self.columns.first(held)
        codes = {name: torch.cat([old[name], states], dim=2) for name, states in new.items()}
        self.columns.take(codes, kept_indices, views, arrived.limits)

        def states(slots: Tensor) -> tuple[Tensor, Tensor]:
            place = kept_indices.expand(-1, slots.shape[1], -1).gather(-1, slots)
            return gather_slots(keys, place), gather_slots(values, place)

        self.exact.find(arrived.positions, arrived.count, states)

    def vacate(self, gone: Tensor) -> None:
        """See `Store.vacate`."""
        self.exact.vacate(gone)

    def reorder(self, order: Tensor) -> None:
        """See `Store.reorder`."""
        super().reorder(order)
        places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        self.exact.move(torch.empty_like(order).scatter_(-1, order, places))

    def take_back(self, left: Tensor) -> None:
        """See `Store.take_back`."""
        self.exact.taken_back(left)

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Store.map_rows`."""
        super().map_rows(change)
        old = self.exact
        new = old.change(change)
        if self.room.fixed and new.keys.shape == old.keys.shape:
            for held, part in zip(old.tensors(), new.tensors(), strict=True):
                held.copy_(part)
        else:
            self._exact = new.change(self.room.own)

    def clear(self) -> None:
        """See `Store.clear`."""
        self.uncoded = 0
        super().clear()
        if self.room.fixed and self._exact is not None:
            for held in self._exact.tensors():
                held.zero_()

    def move_to(self, device: torch.device | str) -> None:
        """See `Store.move_to`."""
        super().move_to(device)
        if self._exact is not None:
            self._exact = self._exact.change(lambda held: held.to(device, non_blocking=True))
            fused.prepare(self.exact.keys.device)

    def widen(self, dtype: torch.dtype) -> None:
        """See `Store.widen`."""
        names = [codes for codes, _ in _CODES]
        plain = [name for name, codec in zip(names, self._codecs, strict=True) if codec.packed_dtype(dtype) == dtype]
        self.columns.widen(plain, dtype)
        self._exact = self.exact.change(lambda held: held.to(dtype) if held.dtype.is_floating_point else held)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self, held: int) -> StateDict:
        """See `Store.state_dict`."""
        return {**super().state_dict(held), "uncoded": self.uncoded, **self.exact.state_dict()}

    def _like_saved(self, saved: SavedState) -> tuple[Tensor, Tensor]:
        keys, values = saved.peek("keys", 4), saved.peek("values", 4)
        saved.need(saved.has("key_codes"), "its keys and values are as they came, and here they are in few bits")
        saved.need(keys.numel() > 0 and values.numel() > 0, "it has no keys and values")
        return keys[:, :, :0], values[:, :, :0]

    def _load_beside(self, saved: SavedState, held: int, size: int) -> None:
        self.uncoded = saved.number("uncoded", 0, size - 1)
        self.exact.load_state(saved, held)


def _one_behind_the_other(*rows: Tensor) -> Tensor:
    return torch.cat(rows)


def _without_slots(states: Tensor) -> tuple[int, ...]:
    return (*states.shape[:2], states.shape[3])

"""The store of a layer: its keys and values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..attention.in_place import carry
from ..tensors.parts import split_rows, tensors_of
from ..tensors.saved import StateDict, in_range
from .arriving import StateKind
from .coders import BOTH, Coder, KeysValues, Plain, Visible
from .columns import Columns, gather_slots, slot_index
from .exact import EMPTY, Exact, Newest, Source
from .segments import Segments
from .tensors import byte_count


@dataclass(frozen=True)
class Arrived:
    """The tokens that are held after a forward.

    Attributes:
        positions: `[batch, 1 or sets, held]`, -1 for pads and dead slots.
        new: `[batch, 1 or sets, n]`, like `positions`, for the tokens that have just come, held or not.
        count: `[batch]` number of real tokens of each row so far, held or not.
        limits: `[batch, 1 or sets]`, number of slots that each set may use; None = all. The other slots are dead.
        several: whether each row is known to have got several real tokens.
    """

    positions: Tensor
    new: Tensor
    count: Tensor
    limits: Tensor | None = None
    several: bool = False


def no_mask() -> None:
    """None, for a layer that needs no mask of its own."""


class Store:
    """Keys and values of a layer, in columns that are replaced as rarely as possible.

    The store grows as it fills. For compiled steps it has the slots of the whole budget from the start.

    If the coder rounds, every token is encoded once; later operations move or overwrite its codes. A single token is
    first stored without rounding, and the layer calls `encode` when a whole block has come. Rows that begin with single
    tokens are encoded from their first whole block on, see `Exact`.

    Attributes:
        coder: says what lies in the columns.
        rounds, rerotation: those of the coder.
        columns: what is stored.
        uncoded: number of single tokens since the last `encode`.
        due: value of `uncoded` at which `encode` must be called: a block, or less if a row fills its first block then.
        young: whether tokens from before the last `encode` have no codes, in rows without statistics.
        all_came: whether none of these was a pad in some row, and none was restored.
        dtype, device: dtype and device of keys and values; None before the first forward.

    Args:
        coder: see above.
        fixed: whether all tensors keep their addresses, for compiled steps. Unused slots hold zeros.
        ragged: whether rows and KV heads may have different numbers of slots, without padding. Not with `rerotation`.
    """

    def __init__(self, coder: Coder | None = None, fixed: bool = False, ragged: bool = False) -> None:
        self.coder: Coder = coder or Plain()
        self.rounds, self.rerotation = self.coder.rounds, self.coder.rerotation
        self.columns = Columns(fixed, self.rounds, ragged)  # hidden slots are also decoded
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.uncoded, self.due, self.young, self.all_came = 0, 0, False, True
        #: Values of `uncoded` at which rows without statistics fill their first block, or more values; known without
        #: reading a tensor.
        self._first_blocks: frozenset[int] = frozenset()

    # ---- what there is --------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of all slots, used or not, `[batch, sets, slots, ...]` each: keys and values, or their
        codes, levels and positions.

        Raises:
            RuntimeError: no token has been seen.
        """
        if not self.columns.tensors:
            raise RuntimeError("The cache is empty: run a forward first.")
        return tuple(column for name, column in self.columns.tensors.items() if name != "rerotated")

    @property
    def exact(self) -> Exact:
        """The tokens that are not rounded.

        Raises:
            RuntimeError: no token has been seen.
        """
        exact: Exact | None = self.columns.beside
        if exact is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return exact

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of all slots, used or not, by purpose, and of what is beside."""
        if not self.rounds:
            return {"keys and values": self.columns.bytes}
        parts = {"tokens as they came": byte_count(*tensors_of(self.columns.beside))}
        for name, column in self.columns.tensors.items():
            purpose = name.split("_")[-1]  # of keys and of values
            parts[purpose] = parts.get(purpose, 0) + byte_count(column)
        return parts

    def token_bytes(self, keys: Tensor, values: Tensor) -> int:
        """Bytes of one slot in all rows, for states like these, of any number of tokens."""
        columns = self.coder.kinds(keys, values)[0].values()
        return sum(prod((*part.shape[:2], *part.shape[3:])) * part.element_size() for part in columns)

    def fixed_bytes(self, keys: Tensor, values: Tensor) -> int:
        """Bytes that do not depend on the number of slots."""
        return byte_count(*tensors_of(self.coder.kinds(keys, values)[1]))

    @property
    def copies(self) -> bool:
        """Whether `read` returns new tensors, never the storage itself."""
        return self.rounds or self.columns.layout.lengths is not None

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.columns.shape[2]

    # ---- what attention reads -------------------------------------------------------------------------------------

    def carrier(self, keys: Tensor, held: int | None = None, visible: Visible = no_mask) -> Tensor | None:
        """Keys without tokens that carry the storage, if attention can read it in its own form (`in_place`); None if
        attention needs keys and values.

        Args:
            keys: `[batch, kv_heads, 1, dim]` of the new token, which is in the store already.
            held: number of slots in use, the first ones; None = all.
            visible: returns `[batch, 1 or kv_heads, held or more]` bool, the slots that hold a token; called only if
                attention can read the storage; None = all, or those that the model's mask shows.
        """
        reader = self.coder.reader(self.columns, keys, held, visible)
        return None if reader is None else carry(keys, reader)

    def shown(self, held: int | None = None) -> KeysValues:
        """Like `read`, for attention: rotated keys, if positions are counted in the cache."""
        if self.rounds:
            return self.read(held)
        columns = self.columns.layout.first(self.columns.tensors, held)
        return columns["rerotated" if "rerotated" in columns else "keys"], columns["values"]

    def shown_before(self, held: int, real: Tensor | None) -> KeysValues:
        """Like `shown`, as it will be after one more token, if the store `rounds`; `real` `[batch, 1]` is False for
        rows whose token is a pad."""
        exact, states = self.exact, self.read(held)
        if self._first_blocks:
            exact.meet_blocks(self.coder.codecs)
        old = exact.oldest(real)
        codes = self.coder.encode(old.keys, old.values, old.positions, exact)  # they may not be written yet
        for read, rounded in zip(states, self.coder.decode(codes, exact), strict=True):
            index = slot_index(old.slots, read)
            read.scatter_(2, index, torch.where(old.waits[..., None], rounded, read.gather(2, index)))
        return states

    @property
    def turns(self) -> bool:
        """Whether attention reads rotated keys."""
        return "rerotated" in self.columns.tensors

    def turn(self, shifts: Tensor) -> None:
        """Rotate the held keys forward by `shifts` `[batch, sets, slots or more]` positions, for attention."""
        if self.rerotation is not None:
            self._add_rerotated()
            columns = self.columns
            self.rerotation.rotate_by(columns["keys"], shifts[..., : self.slots], columns["rerotated"])

    def _add_rerotated(self) -> None:
        columns = self.columns
        if not self.turns:
            columns.use({**columns.tensors, **columns.like({"rerotated": columns["keys"]}, self.slots)})

    # ---- room -----------------------------------------------------------------------------------------------------

    def slots_to_begin_with(self, tokens: int, block_size: int, most: int) -> int:
        """Number of slots for a prompt of so many tokens, so that a large budget wastes no memory on a short prompt. If
        rows or heads have different budgets, a prompt that overflows is not appended, and one block is enough."""
        if self.columns.ragged and tokens > most:
            return min(block_size, most)
        if self.columns.fixed:
            return most
        blocks = -(-(tokens + 1) // block_size)
        return min(blocks * block_size, most)

    def start(self, keys: Tensor, values: Tensor, least: int, most: int) -> None:
        """Make room for `least` tokens of states like these, unless the storage of an earlier prompt fits."""
        held = self.columns.tensors
        if not (held and least <= self.slots <= most and self._fits(keys, values)):
            self.make(keys, values, least)
        self.uncoded, self.all_came = 0, True
        if self.rounds:
            exact = self.exact
            exact.clear()
            self._first_blocks, self.due, self.young = frozenset([exact.newest]), exact.newest, False

    def _fits(self, keys: Tensor, values: Tensor) -> bool:
        """Whether the present storage could hold such states."""
        held, (kinds, exact) = self.columns.tensors, self.coder.kinds(keys, values)
        beside = zip(tensors_of(self.columns.beside), tensors_of(exact), strict=True)
        pairs = [*((part[:, :, :0], kinds[name]) for name, part in held.items()), *beside]
        return keys.device == self.tensors[0].device and all(
            (part.shape, part.dtype) == (kind.shape, kind.dtype) for part, kind in pairs
        )

    def make(self, keys: Tensor, values: Tensor, slots: int) -> None:
        """Allocate slots for so many tokens of states like these."""
        columns, (kinds, exact) = self.columns, self.coder.kinds(keys, values)
        columns.use({})  # these are free before there are others
        new = columns.like(kinds, slots)
        if not columns.fixed:
            new.pop("rerotated", None)  # nothing is rotated until `turn`
        if exact is not None:
            exact = exact.change(lambda kind: columns.make(kind.shape, kind.dtype, keys.device))
        columns.use(new, None, exact)

    def grow(self, held: int, tokens: int, block_size: int, most: int) -> None:
        """Make room for so many tokens. If the storage grows, it at least doubles."""
        if tokens > self.slots:
            slots = max(2 * self.slots, self.slots_to_begin_with(tokens, block_size, most))
            self.columns.resize(min(slots, most), held)

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def detached(self, keys: Tensor, values: Tensor) -> KeysValues:
        """New states without gradients, in the dtype of the held ones."""
        # Checking is cheaper than a call that changes nothing, and this runs for every token and layer.
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        if self.dtype is not None and (keys.dtype != self.dtype or values.dtype != self.dtype):
            keys, values = keys.to(self.dtype), values.to(self.dtype)
        return keys, values

    def read(self, held: int | None = None, reads: Sequence[str] = BOTH, rows: Tensor | None = None) -> KeysValues:
        """Keys and values of the first `held` slots, or of all: `[batch, kv_heads, held, dim]` in the model's dtype.
        `reads`: which of them; the others may have no channels. `rows`: of these `[n]` int64 alone.

        Do not write to them: these are views, or decoded copies in a store that encodes tokens.
        """
        return self.coder.read(self.columns if rows is None else self.columns.of_rows(rows), held, reads)

    def at(self, slots: Tensor) -> KeysValues:
        """Like `read`, for the slots `[batch, 1 or kv_heads, n]`."""
        states = self.coder.decode(self.columns.at(slots), self.columns.beside)
        return self.exact.instead(slots, *states) if self.rounds else states

    def meet(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Called before several tokens are written to a store that `rounds`; `real` `[batch, n]` bool, None = all."""
        if self._first_blocks:
            self.exact.meet(self.coder.codecs, (keys, values), real, waiting=self.uncoded > 0 or self.young)

    def _await_first_blocks(self, at: Iterable[int]) -> None:
        """Rows without statistics will fill their first block at these values of `uncoded`."""
        self._first_blocks, block = frozenset(at), self.exact.newest
        self.due = min([block, *self._first_blocks])
        self.young = self.due < block

    def _look_for_first_blocks(self) -> None:
        """Rows may have others than before. Reads a tensor."""
        self._await_first_blocks([self.uncoded + missing for missing in self.exact.first_blocks()])

    def _find(self, arrived: Arrived, states: Source) -> None:
        exact = self.exact
        exact.find(arrived.positions, arrived.count, states)
        if self._first_blocks and not arrived.several:
            self._look_for_first_blocks()
        elif self._first_blocks:
            self._first_blocks, self.due, self.young = frozenset(), exact.newest, False

    def append(self, start: int, keys: Tensor, values: Tensor, arrived: Arrived | None = None) -> None:
        """Write new states to the slots from `start` on.

        Args:
            arrived: the tokens that are held afterwards; needed if the store `rounds`.
        """
        self.columns.append(start, self._encoded(keys, values, None if arrived is None else arrived.new))
        if arrived is None or not self.rounds:
            return

        def states(slots: Tensor) -> KeysValues:
            new, before = (slots >= start)[..., None], self.at(slots.clamp_max(max(start - 1, 0)))
            came = (gather_slots(states, (slots - start).clamp_min(0)) for states in (keys, values))
            new_k, new_v = (torch.where(new, one, other) for one, other in zip(came, before, strict=True))
            return new_k, new_v

        self._find(arrived, states)

    def keep(
        self, keys: Tensor, values: Tensor, kept_indices: Tensor, held: int, arrived: Arrived, views: bool
    ) -> None:
        """Keep the tokens at `kept_indices` `[batch, sets, n]` of these states, and drop all others; only new tokens
        are encoded, of a prompt in one piece those that stay.

        Args:
            keys, values: the first `held` tokens as `read` returned them, followed by new ones.
            arrived: the tokens that are held afterwards.
            views: whether the states are views of the storage.
        """
        if not self.rounds:
            self.columns.take(self._encoded(keys, values), kept_indices, views, arrived.limits)
            return

        def states(slots: Tensor) -> KeysValues:
            place = kept_indices.expand(-1, slots.shape[1], -1).gather(-1, slots)
            return gather_slots(keys, place), gather_slots(values, place)

        if held:
            old, new = self.columns.first(held), self._encoded(keys[:, :, held:], values[:, :, held:], arrived.new)
            joined = {name: torch.cat([old[name], states], dim=2) for name, states in new.items()}
            self.columns.take(joined, kept_indices, views, arrived.limits)
        else:
            slots = torch.arange(kept_indices.shape[-1], device=keys.device).expand(*keys.shape[:2], -1)
            stay = self._encoded(*states(slots), arrived.positions)
            self.columns.take(stay, slots[:, : kept_indices.shape[1]], views, arrived.limits)
        self._find(arrived, states)

    def _encoded(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        # The position of a pad may be anything.
        positions = None if positions is None else positions.clamp_min(0)
        states = self.coder.encode(keys, values, positions, self.columns.beside)
        if self.rerotation is not None and not self.turns:
            del states["rerotated"]
        return states

    def overwrite(self, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Write a single token to the slot `[batch, sets, 1]`, except in rows where `real` `[batch, 1]` is False. If
        the store `rounds`, `encode` must be called when it is `due`."""
        if self.rounds:
            self.exact.put(slot[..., 0], keys, values, real)
            self.wrote(real)
        else:
            self.columns.overwrite(slot, self._encoded(keys, values), None if real is None else real[..., None])

    def write(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        """Like `overwrite`, for the slot `[batch, sets]`, in compiled code; the host counts in `wrote`."""
        if self.rounds:
            self.exact.put(slot, *self.detached(keys, values), None)
        else:
            self.columns.write(slot, self.coder.encode(keys, values))

    def wrote(self, real: Tensor | None = None) -> None:
        """Called on the host of a store that `rounds`, after `write`; `real`: see `overwrite`."""
        self.exact.counted(real)
        self.uncoded += 1
        self.all_came = self.all_came and real is None
        if real is not None and self._first_blocks:
            self._look_for_first_blocks()

    def encode(self, together: "Sequence[Store]" = ()) -> list[Newest]:
        """Write the codes of the single tokens that are not encoded yet. Those of rows without statistics go on
        waiting, see `Exact`.

        Args:
            together: further stores whose tokens are encoded in the same operations, see `coded_kind`.

        Returns:
            The newest tokens of this store and of the others, as they were before.
        """
        stores = [self, *together]
        for store in stores:
            if store._first_blocks:
                store.exact.meet_blocks(store.coder.codecs)
        exact, rows = joined([store.exact for store in stores]), len(self.exact.count)
        new = exact.newest_tokens()
        codes = self.coder.encode(new.keys, new.values, new.positions, exact)
        if all([store.uncoded == exact.newest and store.all_came for store in stores]):
            _write_all(stores, new.slots, codes, rows)
        else:
            of_each = {name: states.split(rows) for name, states in codes.items()}
            for at, (store, own) in enumerate(zip(stores, split_rows(new, rows), strict=True)):
                store.columns.overwrite(own.slots, {name: states[at] for name, states in of_each.items()}, own.waits)
        for store in stores:
            if not store._first_blocks:
                store.exact.coded.copy_(store.exact.count)
            else:
                store.exact.encoded()
                store._await_first_blocks([at - store.uncoded for at in store._first_blocks if at > store.uncoded])
            store.uncoded, store.all_came = 0, True
        return split_rows(new, rows)

    @property
    def coded_kind(self) -> tuple[object, ...]:
        """Equal for stores whose tokens can be encoded in the same operations."""
        return (
            *[getattr(codec, "kind", id(codec)) for codec in self.coder.codecs],
            *self.columns.beside.alike,
            self.columns.layout.lengths is None,
            *self.columns.tensors,
        )

    def vacate(self, gone: Tensor) -> None:
        """Called when the tokens in these slots, `[batch, sets, held]` bool, are removed."""
        if self.rounds:
            self.exact.vacate(gone)
            self.all_came = False

    def reorder(self, order: Tensor) -> None:
        """Reorder the first slots by `order` `[batch, sets, held]`."""
        self.columns.reorder(order)
        if self.rounds:
            self.exact.reorder(order)

    def take_back(self, left: Tensor) -> None:
        """Called when tokens are taken back: the first `left` `[batch]` real tokens of each row remain."""
        if self.rounds:
            self.exact.taken_back(left)
            self._look_for_first_blocks()

    # ---- life -----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the tokens. Keep the tensors for the next prompt, except segments, which fit no other prompt."""
        columns, self.uncoded = self.columns, 0
        if columns.layout.lengths is not None:
            columns.use({})
        elif columns.fixed:
            columns.zero()
        else:
            stays = {name: column for name, column in columns.tensors.items() if name != "rerotated"}
            columns.use(stays, None, columns.beside)

    def prefetch(self) -> None:
        """Move all tensors back to the device."""
        if self.device is not None:
            self.columns.move_to(self.device)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self, held: int) -> StateDict:
        """The state of the first `held` slots."""
        return {"slots": self.slots, "uncoded": self.uncoded, **self.columns.state_dict(held)}

    def load_state(self, saved: StateDict, rows: int, held: int, most: int, device: torch.device) -> StateKind:
        """Restore the state of another store of so many rows, with `held` slots in use of `most` at most.

        Returns:
            Shapes, dtype and device of keys and values.

        Raises:
            ValueError: the state does not fit, or an index is out of range.
        """
        lengths, exact = saved["lengths"], saved["beside"]
        states = [(exact or saved)[name] for name in BOTH]
        if lengths is not None and exact is None:  # [total, dim]
            states = [part.new_empty(*lengths.shape, 0, part.shape[-1]) for part in states]
        keys, values = (part[:, :, :0] for part in states)
        kind = StateKind.of(0, keys, values)
        if len(keys) != rows or (exact is not None) != self.rounds or not (lengths is None or self.columns.ragged):
            raise ValueError("its keys and values are not those of such rows, bits and budgets")
        if exact is not None:
            in_range("slots", exact["slots"], EMPTY, held - 1)
        self.dtype, self.device, self.all_came, self.uncoded = kind.dtype, device, False, saved["uncoded"]
        self.make(keys, values, 0 if lengths is not None else in_range("slots", saved["slots"], held, most))
        if "rerotated" in saved and self.rerotation is not None:
            self._add_rerotated()
        self.columns.load_state(saved, held)
        if self.rounds:
            self._look_for_first_blocks()
        return kind


def joined(parts: Sequence[Exact]) -> Exact:
    """The rows of all of these, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    _newest, *names = vars(parts[0])
    return Exact(parts[0].newest, *[torch.cat([vars(part)[name] for part in parts]) for name in names])


def _write_all(stores: Sequence[Store], slots: Tensor, codes: dict[str, Tensor], rows: int) -> None:
    """Write codes `[stores * rows, sets, n, ...]` to these slots."""
    layout = stores[0].columns.layout
    if isinstance(layout, Segments):
        places = Segments.joined([store.columns.layout for store in stores]).places(slots).flatten()  # type: ignore[misc]
        size = len(places) // len(stores)
        for name, states in codes.items():
            for store, at, own in zip(stores, places.split(size), states.flatten(0, 2).split(size), strict=True):
                store.columns.tensors[name].index_copy_(0, at, own)
        return
    for name, index in layout.index(slots, codes).items():
        if index.ndim == 1:  # of one store
            stores[0].columns.tensors[name].index_copy_(2, index, codes[name])
            continue
        for store, at, own in zip(stores, index.split(rows), codes[name].split(rows), strict=True):
            store.columns.tensors[name].scatter_(2, at, own)

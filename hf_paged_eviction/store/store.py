"""The store of a layer: its keys and values."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..integration.rotary import Rotary
from ..saved import SavedState, StateDict
from .arriving import StateKind
from .columns import Columns, States, no_mask
from .room import Room
from .tensors import serves


@dataclass(frozen=True)
class Arrived:
    """The tokens that are held after a forward.

    Attributes:
        positions: `[batch, 1 or sets, held]`, -1 for pads and dead slots.
        new: `[batch, 1 or sets, n]`, like `positions`, for the tokens that have just come, held or not.
        count: `[batch]` number of real tokens of each row so far, held or not.
        limits: `[batch, 1 or sets]`, number of slots that each set may use; None = all. The other slots are dead.
    """

    positions: Tensor
    new: Tensor
    count: Tensor
    limits: Tensor | None = None


class Store:
    """Keys and values in one column each, which are replaced as rarely as possible.

    The store grows as it fills. For compiled steps it has the slots of the whole budget from the start.

    With `rerotation`, attention reads a copy of the keys that are rotated to other positions. The copy takes half as
    much memory as keys and values. In return a decoded token rotates nothing: the copy is renewed once per block,
    always from the original keys, so rounding errors do not add up. There is no copy until something is evicted.

    Attributes:
        rounds: whether tokens are stored in fewer bits.
        uncoded: number of newest tokens that are not encoded yet.
        room: allocates the tensors.
        columns: keys, values and, with `rerotation`, rotated keys.
        dtype, device: dtype and device of keys and values; None before the first forward.
        rerotation: rotation of these keys in the model; None = attention reads the original keys.

    Args:
        rerotation: see above.
        fixed: whether all tensors keep their addresses, for compiled steps. Unused slots hold zeros.
        columns: makes columns from a room. Columns without padding cannot be combined with `rerotation`.
    """

    rounds = False
    uncoded = 0

    def __init__(
        self,
        rerotation: Rotary | None = None,
        fixed: bool = False,
        columns: Callable[[Room], Columns] = Columns,
    ) -> None:
        self.room = Room(fixed)
        self.columns = columns(self.room)
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.rerotation = rerotation

    @property
    def keys(self) -> Tensor | None:
        """`[batch, kv_heads, slots, dim]`, used or not; None before the first forward."""
        return self.read()[0] if self.columns.tensors else None

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        return self.read()[1] if self.columns.tensors else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of all slots, used or not, `[batch, kv_heads, slots, ...]` each: keys and values.

        Raises:
            RuntimeError: no token has been seen.
        """
        if not self.columns.tensors:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self.columns["keys"], self.columns["values"]

    @property
    def bytes(self) -> int:
        """Bytes of all slots, used or not."""
        return self.columns.bytes

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """`bytes` by purpose."""
        return {"keys and values": self.bytes}

    def token_bytes(self, keys: Tensor, values: Tensor) -> int:
        """Bytes of one slot in all rows, for states like these, of any number of tokens."""
        held = [keys, values, *(() if self.rerotation is None else (keys,))]
        return sum(states.shape[0] * states.shape[1] * states.shape[3] * states.element_size() for states in held)

    def fixed_bytes(self, keys: Tensor, values: Tensor) -> int:
        """Bytes that do not depend on the number of slots."""
        return 0

    @property
    def copies(self) -> bool:
        """Whether `read` returns new tensors, never the storage itself."""
        return self.rounds or self.columns.lengths is not None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of KV heads."""
        return self.columns.shape[:2]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.columns.shape[2]

    # ---- what attention reads -------------------------------------------------------------------------------------

    def carrier(
        self, keys: Tensor, held: int | None = None, visible: Callable[[], Tensor | None] = no_mask
    ) -> Tensor | None:
        """Keys without tokens that carry the storage, if attention can read it in its own form (`in_place`); None if
        attention needs keys and values.

        Args:
            keys: `[batch, kv_heads, 1, dim]` of the new token, which is in the store already.
            held: number of slots in use, the first ones; None = all.
            visible: returns `[batch, 1 or kv_heads, held or more]` bool, the slots that hold a token; called only if
                attention can read the storage; None = all, or those that the model's mask shows.
        """
        return self.columns.carrier(keys, held, visible)

    def shown(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """Like `read`, for attention: rotated keys, if positions are counted in the cache."""
        columns = self.columns.first(held)
        return columns["rerotated" if "rerotated" in columns else "keys"], columns["values"]

    def shown_before(self, held: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Like `shown`, as it will be after one more token; `real` `[batch, 1]` is False for rows whose token is a
        pad."""
        return self.shown(held)

    @property
    def turns(self) -> bool:
        """Whether attention reads rotated keys."""
        return "rerotated" in self.columns.tensors

    def turn(self, shifts: Tensor) -> None:
        """Rotate the held keys forward by `shifts` `[batch, sets, slots or more]` positions, for attention."""
        if self.rerotation is not None:
            self._make_room_for_rerotated()
            columns = self.columns
            self.rerotation.rotate_by_into(columns["rerotated"], columns["keys"], shifts[..., : self.slots])

    def _make_room_for_rerotated(self) -> None:
        if self.rerotation is not None and not self.turns:
            like = self.columns["keys"]
            turned = self.room.make(like.shape, like.dtype, like.device)
            self.columns.use({**self.columns.tensors, "rerotated": turned})

    def columns_of(self, keys: Tensor, values: Tensor) -> States:
        """Tokens by column, with keys at their own positions."""
        states = {"keys": keys, "values": values}
        if "rerotated" in self.columns.tensors:
            states["rerotated"] = keys
        return states

    # ---- room -----------------------------------------------------------------------------------------------------

    def slots_to_begin_with(self, tokens: int, block_size: int, most: int) -> int:
        """Number of slots for a prompt of so many tokens, so that a large budget wastes no memory on a short prompt. If
        rows or heads have different budgets, a prompt that overflows is not appended, and one block is enough."""
        if not self.columns.pads and tokens > most:
            return min(block_size, most)
        if self.room.fixed:
            return most
        blocks = -(-(tokens + 1) // block_size)
        return min(blocks * block_size, most)

    def start(self, keys: Tensor, values: Tensor, least: int, most: int) -> None:
        """Make room for `least` tokens of states like these, unless the storage of an earlier prompt fits."""
        held = self.columns.tensors.get
        if not (serves(held("keys"), keys, least, most) and serves(held("values"), values, least, most)):
            self.make(keys, values, least)

    def make(self, keys: Tensor, values: Tensor, slots: int) -> None:
        """Allocate slots for so many tokens of states like these."""
        states = {"keys": keys, "values": values}  # nothing is rotated until `turn`
        self.columns.use(self.room.like(states, slots))
        if self.room.fixed:
            self._make_room_for_rerotated()

    def give_up(self) -> None:
        """Free all tensors."""
        self.columns.use({})

    def move(self, slots: int, held: int) -> None:
        """Move the first `held` slots to tensors of another size."""
        self.columns.resize(slots, held)

    def grow(self, held: int, tokens: int, block_size: int, most: int) -> None:
        """Make room for so many tokens. If the storage grows, it at least doubles."""
        if tokens > self.slots:
            self.move(min(max(2 * self.slots, self.slots_to_begin_with(tokens, block_size, most)), most), held)

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def detached(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New states without gradients, in the dtype of the held ones."""
        # Checking is cheaper than a call that changes nothing, and this runs for every token and layer.
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        if self.dtype is not None and (keys.dtype != self.dtype or values.dtype != self.dtype):
            keys, values = keys.to(self.dtype), values.to(self.dtype)
        return keys, values

    def read(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `held` slots, or of all: `[batch, kv_heads, held, dim]` in the model's dtype.

        Do not write to them: these are views, or decoded copies in a store that encodes tokens.
        """
        columns = self.columns.first(held)
        return columns["keys"], columns["values"]

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Like `read`, for the slots `[batch, 1 or kv_heads, n]`."""
        columns = self.columns.at(slots)
        return columns["keys"], columns["values"]

    def meet(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Called before several tokens are written; `real` `[batch, n]` bool, None = all are real."""

    def append(self, start: int, keys: Tensor, values: Tensor, arrived: Arrived | None = None) -> None:
        """Write new states to the slots from `start` on.

        Args:
            arrived: the tokens that are held afterwards; needed if the store `rounds`.
        """
        self.columns.append(start, self.columns_of(keys, values))

    def overwrite(self, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Write a single token to the slot `[batch, sets, 1]`, except in rows where `real` `[batch, 1]` is False."""
        self.columns.overwrite(slot, self.columns_of(keys, values), None if real is None else real[..., None])

    def write(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        """Like `overwrite`, for the slot `[batch, sets]`, in compiled code."""
        self.columns.write(slot, self.columns_of(keys, values))

    def keep(
        self, keys: Tensor, values: Tensor, kept_indices: Tensor, held: int, arrived: Arrived, views: bool
    ) -> None:
        """Keep the tokens at `kept_indices` `[batch, sets, n]` of these states, and drop all others.

        Args:
            keys, values: the first `held` tokens as `read` returned them, followed by new ones.
            arrived: the tokens that are held afterwards.
            views: whether the states are views of the storage.
        """
        self.columns.take(self.columns_of(keys, values), kept_indices, views, arrived.limits)

    def vacate(self, gone: Tensor) -> None:
        """Called when the tokens in these slots, `[batch, sets, held]` bool, are removed."""

    def reorder(self, order: Tensor) -> None:
        """Reorder the first slots by `order` `[batch, sets, held]`."""
        self.columns.reorder(order)

    def wrote(self) -> None:
        """Called on the host after compiled code has called `write`."""

    def take_back(self, left: Tensor) -> None:
        """Called when tokens are taken back: the first `left` `[batch]` real tokens of each row remain."""

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0."""
        self.columns.map_rows(change)

    def clear(self) -> None:
        """Forget the tokens. Keep the tensors for the next prompt, except segments, which fit no other prompt."""
        if self.columns.lengths is not None:
            self.give_up()
        elif self.room.fixed:
            self.columns.zero()
        else:
            self.columns.use({name: self.columns[name] for name in self.columns.tensors if name != "rerotated"})

    def move_to(self, device: torch.device | str) -> None:
        """Move all tensors to another device."""
        self.columns.move_to(device)

    def prefetch(self) -> None:
        """Move all tensors back to the device."""
        if self.device is not None:
            self.move_to(self.device)

    def widen(self, dtype: torch.dtype) -> None:
        """Convert all keys and values to a wider dtype."""
        self.columns.widen(self.columns.tensors, dtype)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self, held: int) -> StateDict:
        """The state of the first `held` slots."""
        return {"slots": self.slots, **self.columns.state_dict(held)}

    def load_state(self, saved: SavedState, rows: int, held: int, most: int, size: int) -> StateKind:
        """Restore the state of another store.

        Args:
            rows: number of rows.
            held: number of slots in use.
            most: largest number of slots.
            size: block size.

        Returns:
            Shapes, dtype and device of keys and values.

        Raises:
            ValueError: the state does not fit.
        """
        keys, values = self._like_saved(saved)
        fits = keys.shape[:2] == values.shape[:2] and keys.shape[0] == rows and keys.shape[1] > 0
        saved.need(fits, f"keys {list(keys.shape)} and values {list(values.shape)} are not those of {rows} rows")
        fits = keys.dtype == values.dtype and keys.dtype.is_floating_point
        saved.need(fits, f"keys are {keys.dtype}, values {values.dtype}")
        ragged = saved.has("lengths")
        differ = ragged and self.columns.pads
        saved.need(not differ, "its heads hold different numbers of tokens, and here they do not")
        slots = saved.number("slots", held, held if ragged else most)
        self.dtype, self.device = keys.dtype, saved.device
        self.make(keys.to(saved.device), values.to(saved.device), 0 if ragged else slots)
        self._load_beside(saved, held, size)
        self.columns.load_state(saved, held)
        return StateKind(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, saved.device)

    def _like_saved(self, saved: SavedState) -> tuple[Tensor, Tensor]:
        """`[rows, kv_heads, 0, dim]`, keys and values like those of the file, without tokens."""
        like = [saved.peek(name, 2 if saved.has("lengths") else 4) for name in ("keys", "values")]
        saved.need(all(states.numel() for states in like), "it has no keys and values")
        if saved.has("lengths"):
            sets = saved.peek("lengths", 2).shape
            like = [states.new_empty(*sets, 0, states.shape[1]) for states in like]
        return like[0][:, :, :0], like[1][:, :, :0]

    def _load_beside(self, saved: SavedState, held: int, size: int) -> None:
        """What lies beside the columns, or says which there are."""
        if saved.has("rerotated") and self.rerotation is not None:
            self._make_room_for_rerotated()

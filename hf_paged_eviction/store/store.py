"""Where a layer keeps its keys and values."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..saved import SavedState, StateDict
from .arriving import StateKind
from .columns import Columns, States
from .rerotation import Rerotation
from .room import Room
from .tensors import serves


@dataclass(frozen=True)
class Arrived:
    """Which tokens are held once others have come.

    Attributes:
        positions: `[batch, 1 or sets, held]`, -1 for pads and dead slots.
        new: `[batch, 1 or sets, n]`, as `positions`, of those that have just come, held or not.
        count: `[batch]` real tokens of each row so far, held or not.
        limits: `[batch, 1 or sets]`, how many slots each set may use; None = all. The others are dead.
    """

    positions: Tensor
    new: Tensor
    count: Tensor
    limits: Tensor | None = None


class Store:
    """Keys and values in a column each, made anew as rarely as possible.

    It grows as it fills; for compiled steps it has as many slots as the budget from the start.

    Attributes:
        rounds: whether tokens are kept in fewer bits than they came in.
        uncoded: how many of the newest tokens `encode` has not met yet.
        room: where tensors come from and go to.
        columns: keys, values and, where attention reads turned states, these; see `Rerotation`.
        dtype, device: of keys and values, None before the first forward.
        rerotation: turns what attention reads to other positions; None = it reads what came.

    Args:
        rerotation: see above.
        fixed: whether all tensors stay where they are, for compiled steps. Slots that are not in use hold zeros.
        columns: made from a room; those that do not pad do not go with `rerotation`.
    """

    rounds = False
    uncoded = 0

    def __init__(
        self, rerotation: Rerotation | None = None, fixed: bool = False, columns: Callable[[Room], Columns] = Columns
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
        """What is kept of all slots, used or not, `[batch, kv_heads, slots, ...]` each: keys and values.

        Raises:
            RuntimeError: nothing was seen yet.
        """
        if not self.columns.tensors:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self.columns["keys"], self.columns["values"]

    @property
    def bytes(self) -> int:
        """Of all slots, used or not."""
        return self.columns.bytes

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """`bytes`, by what they are."""
        return {"keys and values": self.bytes}

    def token_bytes(self, keys: Tensor, values: Tensor) -> int:
        """What a slot for tokens of all rows will take, given states like these, of any number of tokens."""
        held = [keys, values, *(() if self.rerotation is None else (keys,))]
        return sum(states.shape[0] * states.shape[1] * states.shape[3] * states.element_size() for states in held)

    def fixed_bytes(self, keys: Tensor, values: Tensor) -> int:
        """What is taken beside the slots, whatever their number."""
        return 0

    @property
    def copies(self) -> bool:
        """Whether `read` makes new tensors, so that what is shown is never the storage itself."""
        return self.rounds or self.columns.lengths is not None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and KV heads."""
        return self.columns.shape[:2]

    @property
    def slots(self) -> int:
        """How many there are."""
        return self.columns.shape[2]

    # ---- what attention reads -------------------------------------------------------------------------------------

    def noted(self, keys: Tensor, empty: int = 0, visible: Tensor | None = None) -> Tensor | None:
        """No keys, with a note of all that is held, where attention may read that where it lies in a form of its own;
        None where it gets keys and values.

        Args:
            keys: `[batch, kv_heads, 1, dim]`, which have been taken in.
            empty: so many slots at the beginning of each row and head hold no token; all others are visible.
            visible: `[batch, 1 or kv_heads, slots or more]` bool, the slots that hold a token; None = all but `empty`.
        """
        return self.columns.noted(keys, empty, visible)

    def shown(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """As `read`, for attention: turned, where positions are counted in the cache."""
        columns = self.columns.first(held)
        return columns["rerotated" if "rerotated" in columns else "keys"], columns["values"]

    def shown_before(self, held: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `shown`, as it will be when one more token has come; not in rows where `real` `[batch, 1]` is False."""
        return self.shown(held)

    @property
    def turns(self) -> bool:
        """Whether attention is shown something else than what came."""
        return "rerotated" in self.columns.tensors

    def turn(self, shifts: Tensor) -> None:
        """Turn the states held forward by `shifts` `[batch, sets, slots or more]` positions, for attention."""
        if self.rerotation is not None:
            self._make_room_for_rerotated()
            columns, rotary = self.columns, self.rerotation.rotary
            rotary.rotate_by_into(columns["rerotated"], columns["keys"], shifts[..., : self.slots])

    def _make_room_for_rerotated(self) -> None:
        if self.rerotation is not None and not self.turns:
            like = self.columns["keys"]
            turned = self.room.make(like.shape, like.dtype, like.device)
            self.columns.use({**self.columns.tensors, "rerotated": turned})

    def columns_of(self, keys: Tensor, values: Tensor) -> States:
        """New tokens, column by column: they stand where they came."""
        states = {"keys": keys, "values": values}
        return {**states, "rerotated": keys} if "rerotated" in self.columns.tensors else states

    # ---- room -----------------------------------------------------------------------------------------------------

    def slots_to_begin_with(self, tokens: int, block_size: int, most: int) -> int:
        """What a prompt of so many tokens needs, so that a large budget and a short prompt waste nothing. Where rows or
        heads differ, a prompt that overflows is not appended, and a block is enough."""
        if not self.columns.pads and tokens > most and self.room.pool is None:
            return min(block_size, most)
        if self.room.fixed or self.room.pool is not None:
            return most
        blocks = -(-(tokens + 1) // block_size)
        return min(blocks * block_size, most)

    def start(self, keys: Tensor, values: Tensor, least: int, most: int) -> None:
        """Make room for `least` tokens of states like these, unless what an earlier prompt left has it."""
        held = self.columns.tensors.get
        if not (serves(held("keys"), keys, least, most) and serves(held("values"), values, least, most)):
            self.make(keys, values, least)

    def make(self, keys: Tensor, values: Tensor, slots: int) -> None:
        """Make room for so many tokens of states like these, and for no others."""
        self.columns.use(self.room.like({"keys": keys, "values": values}, slots))  # nothing is turned until `turn`
        if self.room.fixed:
            self._make_room_for_rerotated()

    def give_up(self) -> None:
        """Hold no tensors any more."""
        self.columns.use({})

    def move(self, slots: int, held: int) -> None:
        """To tensors of another size, with the first `held` slots."""
        self.columns.resize(slots, held)

    def grow(self, held: int, tokens: int, block_size: int, most: int) -> None:
        """Make room for so many tokens; where there is less, it at least doubles."""
        if tokens > self.slots:
            self.move(min(max(2 * self.slots, self.slots_to_begin_with(tokens, block_size, most)), most), held)

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def detached(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New states without a gradient and in the type of those that are held."""
        # Asking is cheaper than a call that changes nothing, and this happens for every token and layer.
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        if self.dtype is not None and (keys.dtype != self.dtype or values.dtype != self.dtype):
            keys, values = keys.to(self.dtype), values.to(self.dtype)
        return keys, values

    def read(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `held` slots, or of all: `[batch, kv_heads, held, dim]` in the model's type.

        Not to be written to: views here, made for the caller where a store keeps something else than it was given.
        """
        columns = self.columns.first(held)
        return columns["keys"], columns["values"]

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, of the slots `[batch, 1 or kv_heads, n]` alone."""
        columns = self.columns.at(slots)
        return columns["keys"], columns["values"]

    def meet(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Several tokens are about to come; `real` `[batch, n]` bool, None = all of them are."""

    def append(self, start: int, keys: Tensor, values: Tensor, arrived: Arrived | None = None) -> None:
        """Write new states to the slots from `start` on.

        Args:
            arrived: what is held then, where the store `rounds`.
        """
        self.columns.append(start, self.columns_of(keys, values))

    def overwrite(self, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Write a single token to the slot `[batch, sets, 1]`; not in rows that `real` `[batch, 1]` says are pads."""
        self.columns.overwrite(slot, self.columns_of(keys, values), None if real is None else real[..., None])

    def write(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `overwrite`, to the slot `[batch, sets]`, for compiled code."""
        self.columns.write(slot, self.columns_of(keys, values))

    def keep(
        self, keys: Tensor, values: Tensor, kept_indices: Tensor, held: int, arrived: Arrived, views: bool
    ) -> None:
        """Hold what stands at `kept_indices` `[batch, sets, n]` in these states, and nothing else.

        Args:
            keys, values: the first `held` are what `read` gave, the others are new.
            arrived: what is held then.
            views: whether the states are views of what is kept.
        """
        self.columns.take(self.columns_of(keys, values), kept_indices, views, arrived.limits)

    def vacate(self, gone: Tensor) -> None:
        """The tokens in these slots, `[batch, sets, held]` bool, are no more."""

    def reorder(self, order: Tensor) -> None:
        """Bring the first slots into another order, `[batch, sets, held]`."""
        self.columns.reorder(order)

    def wrote(self) -> None:
        """Compiled code has called `write`."""

    def take_back(self, left: Tensor) -> None:
        """Of each row the first `left` `[batch]` real tokens remain."""

    def encode(self) -> None:
        """Bring the newest tokens into the form in which they are kept, where that is put off."""

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0."""
        self.columns.map_rows(change)

    def clear(self) -> None:
        """The tokens are forgotten; the tensors wait for the next prompt, but for segments, which serve no other."""
        if self.columns.lengths is not None:
            self.give_up()
        elif self.room.fixed:
            self.columns.zero()
        else:
            self.columns.use({name: self.columns[name] for name in self.columns.tensors if name != "rerotated"})

    def offload(self) -> None:
        """Move what is held to the CPU."""
        self.columns.move_to("cpu")

    def prefetch(self) -> None:
        """Bring back what is held."""
        if self.device is not None:
            self.columns.move_to(self.device)

    def widen(self, dtype: torch.dtype) -> None:
        """Hold all keys and values in a wider type."""
        self.columns.widen([*self.columns.tensors], dtype)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self, held: int) -> StateDict:
        """The first `held` slots; what lies behind them is nobody's."""
        return {"slots": self.slots, **self.columns.state_dict(held)}

    def load_state(self, saved: SavedState, rows: int, held: int, most: int, size: int) -> StateKind:
        """Hold what another store held.

        Args:
            rows: of the batch.
            held: slots in use.
            most: slots that there may be.
            size: tokens of a block.

        Returns:
            What keys and values are like.

        Raises:
            ValueError: it does not fit.
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

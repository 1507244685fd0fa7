"""Where a layer keeps its keys and values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parts import Snapshot
from .pool import StoragePool
from .tensors import byte_count, gather_slots, make_storage, serves, slot_index, storage_shape
from .turning import Turning


@dataclass(frozen=True)
class HeldSnapshot(Snapshot):
    """What a store of any kind holds.

    Attributes:
        slots: how many there are, used or not.
    """

    slots: int

    @property
    def shape(self) -> torch.Size:
        """`[batch, kv_heads, held, ...]`."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values as they came."""
        raise NotImplementedError

    @property
    def form(self) -> tuple[Tensor, ...]:
        """See `Store.form`; of the tokens that are held."""
        raise NotImplementedError

    @property
    def key_width(self) -> int:
        """Of keys as they came."""
        raise NotImplementedError


@dataclass(frozen=True)
class StoreSnapshot(HeldSnapshot):
    """What a store holds.

    Attributes:
        keys, values: `[batch, kv_heads, held, dim]`.
        turned: as attention is shown those of them that are turned, see `Turning`.
    """

    keys: Tensor
    values: Tensor
    turned: Tensor | None

    @property
    def shape(self) -> torch.Size:
        """See `HeldSnapshot`."""
        return self.keys.shape

    @property
    def dtype(self) -> torch.dtype:
        """See `HeldSnapshot`."""
        return self.keys.dtype

    @property
    def form(self) -> tuple[Tensor, ...]:
        """See `HeldSnapshot`."""
        return self.keys, self.values

    @property
    def key_width(self) -> int:
        """See `HeldSnapshot`."""
        return self.keys.shape[-1]


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
    """Keys and values in one tensor each, which is made anew as rarely as possible. It grows as it fills.

    Attributes:
        rounds: whether tokens are kept in fewer bits than they came in.
        waiting: how many of the newest tokens wait for `encode`.
        pool: where tensors come from and go to; None = they are made for this layer.
        dtype, device: of keys and values, None before the first forward.
        turning: turns what attention reads to other positions; None = it reads what came.
    """

    rounds = False
    waiting = 0

    def __init__(self, turning: Turning | None = None) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.pool: StoragePool | None = None
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.turning = turning

    @property
    def keys(self) -> Tensor | None:
        """`[batch, kv_heads, slots, dim]`, used or not; None before the first forward."""
        return self._keys

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        return self._values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is kept of all slots, used or not, `[batch, kv_heads, slots, ...]` each: keys and values."""
        return self._both

    @property
    def _both(self) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self._keys, self._values

    @property
    def bytes(self) -> int:
        """Of all slots, used or not."""
        return byte_count(self._keys, self._values, self._turned)

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """`bytes`, by what they are."""
        return {"keys and values": self.bytes}

    def token_bytes(self, keys: Tensor, values: Tensor) -> int:
        """What a slot for tokens of all rows will take, given states like these, of any number of tokens."""
        held = [keys, values, *(() if self.turning is None else ((keys, values)[self.turning.of],))]
        return sum(states.shape[0] * states.shape[1] * states.shape[3] * states.element_size() for states in held)

    def fixed_bytes(self, keys: Tensor, values: Tensor) -> int:
        """What is taken beside the slots, whatever their number."""
        return 0

    @property
    def copies(self) -> bool:
        """Whether `read` makes new tensors, so that what is shown is never the storage itself."""
        return self.rounds

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and KV heads."""
        rows, heads = self.tensors[0].shape[:2]
        return rows, heads

    @property
    def slots(self) -> int:
        """How many there are."""
        return self.tensors[0].shape[2]

    # ---- tokens that travel ---------------------------------------------------------------------------------------

    @property
    def form(self) -> tuple[Tensor, ...]:
        """What is kept of the token in each slot, wherever in the text it stands, `[batch, kv_heads, slots, ...]` each:
        in this form it may leave and come back without being changed."""
        return self.tensors

    def form_of(self, keys: Tensor, values: Tensor, held: int, positions: Tensor) -> tuple[Tensor, ...]:
        """The form of more tokens than there are slots.

        Args:
            keys, values: the first `held` are what `read` gave, the others are new.
            positions: `[batch, sets, n]` of the new ones.
        """
        return keys, values

    def decoded(self, form: Sequence[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[batch, kv_heads, n, dim]` of tokens at `positions` `[batch, 1 or sets, n]`, as they are
        read when they are no longer among the newest."""
        keys, values = form
        return keys, values

    def come_back(self, row: Tensor, head: Tensor, slots: Tensor, form: Sequence[Tensor], positions: Tensor) -> None:
        """Tokens are in these slots from now on, where none is that is read as it came.

        Args:
            row, head, slots: indices, `[m, 1, 1]`, `[m or 1, h, 1]` and `[m, 1, n]`.
            form, positions: `[m, h, n, ...]` each, and `[m, 1, n]`.
        """
        for states, new in zip(self.form, form, strict=True):
            states[row, head, slots] = new

    # ---- what attention reads -------------------------------------------------------------------------------------

    def noted(self, keys: Tensor) -> Tensor | None:
        """No keys, with a note of all that is held, where attention may read that where it lies in a form of its own;
        None where it gets keys and values.

        Args:
            keys: `[batch, kv_heads, 1, dim]`, which have been taken in.
        """
        return None

    def shown(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """As `read`, for attention: turned, where positions are counted in the cache."""
        keys, values = self.read(held)
        if self.turning is None or self.turning.turned is None:
            return keys, values
        turned = self.turning.turned if held is None else self.turning.turned[:, :, :held]
        return (turned, values) if self.turning.of == 0 else (keys, turned)

    def shown_before(self, held: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `shown`, as it will be when one more token has come; not in rows where `real` `[batch, 1]` is False."""
        return self.shown(held)

    @property
    def turns(self) -> bool:
        """Whether attention is shown something else than what came."""
        return self._turned is not None

    @property
    def _turned(self) -> Tensor | None:
        return None if self.turning is None else self.turning.turned

    def turn(self, shifts: Tensor) -> None:
        """Turn the states held forward by `shifts` `[batch, sets, slots or more]` positions, for attention."""
        if self.turning is None:
            return
        states = self._both[self.turning.of]
        turned = self.turning.turned
        if turned is None or turned.shape != states.shape:
            self._put_turned(self._make(states, self.slots))
        self.turning.turn(states, shifts[..., : self.slots])

    def _put_turned(self, states: Tensor | None) -> None:
        if self.turning is not None:
            if self.pool is not None and self.turning.turned is not None and self.turning.turned is not states:
                self.pool.give(self.turning.turned)
            self.turning.turned = states

    # ---- room -----------------------------------------------------------------------------------------------------

    def slots_to_begin_with(self, tokens: int, block_size: int, most: int) -> int:
        """What a prompt of so many tokens needs, so that a large budget and a short prompt waste nothing."""
        if self.pool is not None:
            return most
        blocks = -(-(tokens + 1) // block_size)
        return min(blocks * block_size, most)

    def start(self, keys: Tensor, values: Tensor, least: int, most: int) -> None:
        """Make room for `least` tokens of states like these, unless what an earlier prompt left has it.

        Raises:
            ValueError: they are not what can be turned.
        """
        if self.turning is not None:
            self.turning.check((keys, values))
        if not (serves(self._keys, keys, least, most) and serves(self._values, values, least, most)):
            self.make(keys, values, least)

    def make(self, keys: Tensor, values: Tensor, slots: int) -> None:
        """Make room for so many tokens of states like these, and for no others."""
        self.put(*self.new(keys, values, slots))

    def give_up(self) -> None:
        """Hold no tensors any more."""
        self.put(None, None)

    def new(self, keys: Tensor, values: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """Room, with any content, for `slots` tokens of states like these."""
        return self._make(keys, slots), self._make(values, slots)

    def _make(self, like: Tensor, slots: int) -> Tensor:
        make = make_storage if self.pool is None else self.pool.take
        return make(storage_shape(like, slots), like.dtype, like.device)

    def put(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Use these tensors from now on; the old ones go back to the pool. In others nothing is turned until `turn`."""
        if keys is not self._keys:
            self._put_turned(None)
        if self.pool is not None:
            old = [states for states in (self._values, self._keys) if states is not None]
            self.pool.give(*(states for states in old if states is not keys and states is not values))
        self._keys, self._values = keys, values

    def move(self, slots: int, held: int) -> None:
        """To tensors of another size, with the first `held` slots."""
        old, turned = self._both, self._turned
        new = self.new(*old, slots)
        for target, states in zip(new, old, strict=True):
            target[:, :, :held] = states[:, :, :held]
        if turned is not None:
            moved = self._make(turned, slots)
            moved[:, :, :held] = turned[:, :, :held]
        self.put(*new)
        if turned is not None:
            self._put_turned(moved)

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
        keys, values = self._both
        return (keys, values) if held is None else (keys[:, :, :held], values[:, :, :held])

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, of the slots `[batch, 1 or kv_heads, n]` alone."""
        keys, values = self._both
        return gather_slots(keys, slots), gather_slots(values, slots)

    def meet(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Several tokens are about to come; `real` `[batch, n]` bool, None = all of them are."""

    def append(self, start: int, keys: Tensor, values: Tensor, arrived: Arrived | None = None) -> None:
        """Write new states to the slots from `start` on.

        Args:
            arrived: what is held then, where the store `rounds`.
        """
        count = keys.shape[2]
        storage_k, storage_v = self._both
        storage_k.narrow(2, start, count).copy_(keys)
        storage_v.narrow(2, start, count).copy_(values)
        if self.turning is not None:
            self.turning.append(start, (keys, values))

    def overwrite(self, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Write a single token to the slot `[batch, sets, 1]`; not in rows that `real` `[batch, 1]` says are pads."""
        storage_k, storage_v = self._both
        batch, heads, _, width = storage_k.shape
        index_k = slot[..., None].expand(batch, heads, -1, width)  # a view, as `slot_index` makes it
        index_v = index_k if storage_v.shape == storage_k.shape else slot_index(slot, storage_v)
        if real is not None:
            written = real[:, None, :, None]
            keys = torch.where(written, keys, storage_k.gather(2, index_k))
            values = torch.where(written, values, storage_v.gather(2, index_v))
        storage_k.scatter_(2, index_k, keys)
        storage_v.scatter_(2, index_v, values)
        if self.turning is not None:
            self.turning.overwrite(slot, (keys, values), real)

    def write(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `overwrite`, to the slot `[batch, sets]`, for compiled code."""
        written = [*zip(self._both, (keys, values), strict=True)]
        if self.turning is not None and self.turning.turned is not None:
            written.append((self.turning.turned, (keys, values)[self.turning.of]))
        for states, new in written:
            rows, heads = states.shape[:2]
            row, head = torch.arange(rows, device=states.device)[:, None], torch.arange(heads, device=states.device)
            # Not scatter_, for which inductor copies the whole storage.
            states.index_put_((row, head, slot), new.detach().to(states.dtype)[:, :, 0])

    def keep(self, keys: Tensor, values: Tensor, kept: Tensor, held: int, arrived: Arrived, anew: bool) -> None:
        """Hold what stands at `kept` `[batch, sets, n]` in these states, and nothing else.

        Args:
            keys, values: the first `held` are what `read` gave, the others are new.
            arrived: what is held then.
            anew: whether other tensors are needed: for another number of slots, or where the states are views of these.
        """
        storage_k, storage_v = self.new(*self._both, kept.shape[-1]) if anew else self._both
        torch.gather(keys, 2, slot_index(kept, keys), out=storage_k)
        torch.gather(values, 2, slot_index(kept, values), out=storage_v)
        self.put(storage_k, storage_v)

    def reorder(self, order: Tensor) -> None:
        """Bring the first slots into another order, `[batch, sets, held]`."""
        for states in self._all:
            states[:, :, : order.shape[-1]] = gather_slots(states, order)

    @property
    def _all(self) -> list[Tensor]:
        turned = self._turned
        return [*self._both] if turned is None else [*self._both, turned]

    def wrote(self) -> None:
        """Compiled code has called `write`."""

    def take_back(self, left: Tensor) -> None:
        """Of each row the first `left` `[batch]` real tokens remain."""

    def encode(self) -> None:
        """Bring the newest tokens into the form in which they are kept, where that is put off."""

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0."""
        keys, values, *turned = [change(states) for states in self._all]
        self.put(keys, values)
        if turned:
            self._put_turned(turned[0])

    def clear(self) -> None:
        """The tokens are forgotten; the tensors wait for the next prompt."""
        self._put_turned(None)

    def offload(self) -> None:
        """Move keys and values to the CPU."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.to("cpu", non_blocking=True)
            self._values = self._values.to("cpu", non_blocking=True)
            if self.turning is not None:
                self.turning.move_to("cpu")

    def prefetch(self) -> None:
        """Bring keys and values back."""
        if self._keys is not None and self._values is not None and self._keys.device != self.device:
            self._keys = self._keys.to(self.device, non_blocking=True)
            self._values = self._values.to(self.device, non_blocking=True)
            if self.turning is not None:
                self.turning.move_to(self.device)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def snapshot(self, held: int) -> HeldSnapshot:
        """The first `held` slots; what lies behind them is nobody's."""
        turned = self._turned
        return StoreSnapshot(self.slots, *self.read(held), None if turned is None else turned[:, :, :held])

    def restore(self, saved: HeldSnapshot, device: torch.device) -> None:
        """Hold what another store held."""
        if not isinstance(saved, StoreSnapshot):
            raise TypeError(f"A {type(self).__name__} cannot hold a {type(saved).__name__}.")
        keys, values = saved.keys.to(device), saved.values.to(device)
        self.dtype, self.device = keys.dtype, device
        self.put(*self.new(keys, values, saved.slots))
        if keys.shape[2]:
            self.append(0, keys, values)
        if saved.turned is not None and self.turning is not None:
            if self._turned is None:
                self._put_turned(self._make(self._both[self.turning.of], saved.slots))
            self.turning.append(0, (saved.turned.to(device),) * 2)

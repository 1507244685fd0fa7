"""Where a layer keeps its keys and values."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parts import Snapshot
from .pool import StoragePool
from .tensors import byte_count, gather_slots, make_storage, serves, slot_index, storage_shape
from .turning import Turning


@dataclass(frozen=True)
class StoreSnapshot(Snapshot):
    """What a store holds.

    Attributes:
        keys, values: `[batch, kv_heads, held, dim]`.
        turned: as attention is shown those of them that are turned, see `Turning`.
        slots: how many there are, used or not.
    """

    keys: Tensor
    values: Tensor
    turned: Tensor | None
    slots: int


class Store:
    """Keys and values in one tensor each, which is made anew as rarely as possible. It grows as it fills.

    Attributes:
        keys, values: `[batch, kv_heads, slots, dim]`, used or not; None before the first forward.
        pool: where tensors come from and go to; None = they are made for this layer.
        dtype, device: of keys and values, None before the first forward.
        turning: turns what attention reads to other positions; None = it reads what came.
    """

    def __init__(self, turning: Turning | None = None) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.pool: StoragePool | None = None
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.turning = turning

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values, `[batch, kv_heads, slots, dim]`, used or not."""
        if self.keys is None or self.values is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self.keys, self.values

    @property
    def bytes(self) -> int:
        """Of all slots, used or not."""
        return byte_count(self.keys, self.values, self._turned)

    def token_bytes(self, keys: Tensor, values: Tensor) -> int:
        """What a slot for tokens of all rows will take, given states like these, of any number of tokens."""
        held = [keys, values, *(() if self.turning is None else ((keys, values)[self.turning.of],))]
        return sum(states.shape[0] * states.shape[1] * states.shape[3] * states.element_size() for states in held)

    @property
    def slots(self) -> int:
        """How many there are."""
        return self.tensors[0].shape[2]

    # ---- what attention reads -------------------------------------------------------------------------------------

    def shown(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """As `read`, for attention: turned, where positions are counted in the cache."""
        keys, values = self.read(held)
        if self.turning is None or self.turning.turned is None:
            return keys, values
        turned = self.turning.turned if held is None else self.turning.turned[:, :, :held]
        return (turned, values) if self.turning.of == 0 else (keys, turned)

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
        states = self.tensors[self.turning.of]
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
        if not (serves(self.keys, keys, least, most) and serves(self.values, values, least, most)):
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
        if keys is not self.keys:
            self._put_turned(None)
        if self.pool is not None:
            old = [states for states in (self.values, self.keys) if states is not None]
            self.pool.give(*(states for states in old if states is not keys and states is not values))
        self.keys, self.values = keys, values

    def move(self, slots: int, held: int) -> None:
        """To tensors of another size, with the first `held` slots."""
        old, turned = self.tensors, self._turned
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
        keys, values = self.tensors
        return (keys, values) if held is None else (keys[:, :, :held], values[:, :, :held])

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, of the slots `[batch, 1 or kv_heads, n]` alone."""
        keys, values = self.tensors
        return gather_slots(keys, slots), gather_slots(values, slots)

    def append(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Write new states to the slots from `start` on."""
        count = keys.shape[2]
        storage_k, storage_v = self.tensors
        storage_k.narrow(2, start, count).copy_(keys)
        storage_v.narrow(2, start, count).copy_(values)
        if self.turning is not None:
            self.turning.append(start, (keys, values))

    def overwrite(self, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Write a single token to the slot `[batch, sets, 1]`; not in rows that `real` `[batch, 1]` says are pads."""
        storage_k, storage_v = self.tensors
        index_k = slot_index(slot, storage_k)
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
        written = [*zip(self.tensors, (keys, values), strict=True)]
        if self.turning is not None and self.turning.turned is not None:
            written.append((self.turning.turned, (keys, values)[self.turning.of]))
        for states, new in written:
            rows, heads = states.shape[:2]
            row, head = torch.arange(rows, device=states.device)[:, None], torch.arange(heads, device=states.device)
            # Not scatter_, for which inductor copies the whole storage.
            states.index_put_((row, head, slot), new.detach().to(states.dtype)[:, :, 0])

    def keep(self, keys: Tensor, values: Tensor, kept: Tensor, held: int, positions: Tensor, anew: bool) -> None:
        """Hold what stands at `kept` `[batch, sets, n]` in these states, and nothing else.

        Args:
            keys, values: the first `held` are what `read` gave, the others are new.
            positions: `[batch, sets, n]` of the kept tokens, -1 for pads and dead slots.
            anew: whether other tensors are needed: for another number of slots, or where the states are views of these.
        """
        storage_k, storage_v = self.new(*self.tensors, kept.shape[-1]) if anew else self.tensors
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
        return [*self.tensors] if turned is None else [*self.tensors, turned]

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
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.to("cpu", non_blocking=True)
            self.values = self.values.to("cpu", non_blocking=True)
            if self.turning is not None:
                self.turning.move_to("cpu")

    def prefetch(self) -> None:
        """Bring keys and values back."""
        if self.keys is not None and self.values is not None and self.keys.device != self.device:
            self.keys = self.keys.to(self.device, non_blocking=True)
            self.values = self.values.to(self.device, non_blocking=True)
            if self.turning is not None:
                self.turning.move_to(self.device)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def snapshot(self, held: int) -> StoreSnapshot:
        """The first `held` slots; what lies behind them is nobody's."""
        turned = self._turned
        return StoreSnapshot(*self.read(held), None if turned is None else turned[:, :, :held], self.slots)

    def restore(self, saved: StoreSnapshot, device: torch.device) -> None:
        """Hold what another store held."""
        keys, values = saved.keys.to(device), saved.values.to(device)
        self.dtype, self.device = keys.dtype, device
        self.put(*self.new(keys, values, saved.slots))
        if keys.shape[2]:
            self.append(0, keys, values)
        if saved.turned is not None and self.turning is not None:
            if self._turned is None:
                self._put_turned(self._make(self.tensors[self.turning.of], saved.slots))
            self.turning.append(0, (saved.turned.to(device),) * 2)

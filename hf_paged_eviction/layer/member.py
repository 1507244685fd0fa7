"""Takes new tokens into one layer."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from ..integration.rotary import Rotary
from ..masks.padding import Padding
from ..policies import Needs
from ..queries.observer import Queries
from ..static.ring import QueryRing
from ..store.store import Arrived
from ..table.table import BlockTable
from .block_fill import BlockFill
from .exposed import ExposedStates
from .layer_state import LayerState
from .overflow import Overflow
from .rollback import Rollback
from .scores import Scores

#: Keys and values for attention; None where they are read from the store.
Shown = tuple[Tensor, Tensor] | None


class Together(Protocol):
    """What a layer leaves to all layers of its cache."""

    def begin_block(self, member: "Member", real: Tensor | None) -> None:
        """Choose the next blocks to overwrite, if that is due, and prepare single tokens to be written to them.

        Args:
            real: `[B, 1]` bool, rows whose next token is no pad; None = all.
        """

    def encode_blocks(self) -> None:
        """Encode the newest block of every layer."""


@dataclass(eq=False)
class NextSlots:
    """The slots of the next token in compiled steps, for the layers of a group; tensors at fixed addresses.

    Attributes:
        slots: `[layers * B, S, 1]` int64, with the rows of all layers, layer by layer.
        visible: `[layers * B, S, C]` bool, slots with real tokens; None if the model's mask is used, or if all slots
            hold real tokens.
        all_real: whether all usable slots hold real tokens, so that a step needs no mask. It is decided after a forward
            of several tokens and valid until the next one, because a graph has either a mask or none. Compiled code
            does not read it: that would add a guard.
        filling: `visible`; None also if all usable slots hold real tokens.
    """

    slots: Tensor
    visible: Tensor | None
    all_real: bool
    filling: Tensor | None


@dataclass(eq=False)
class Member:
    """One layer as the layers of a cache see each other: it appends, overwrites, or chooses what stays.

    A layer holds its plan, and the plan holds members. If it held layers, or members held the plan, the reference cycle
    would keep the storage of an unused cache until Python's garbage collector runs.

    Attributes:
        state, scores, overflow, rollback, padding, exposed: parts of the layer.
        needs: needs of the policy.
        local_heads, rotary: see `PagedLayer`.
        layer_idx: index in the model, for messages.
        may_fill: whether single tokens need no work beside writing, until a block is full.
        own_mask: whether the model's mask does not fit the layer.
        fill: writes the single tokens of the present block; None where the next one needs checks.
        ring: stores the queries of compiled steps; None if there are none.
        next_slots: slots of the next token in compiled steps; None before the first.
    """

    state: LayerState
    scores: Scores
    overflow: Overflow
    rollback: Rollback
    needs: Needs
    local_heads: LocalHeads
    rotary: Rotary | None
    padding: Padding
    exposed: ExposedStates
    layer_idx: int
    may_fill: bool
    own_mask: bool
    fill: BlockFill | None = None
    ring: QueryRing | None = None
    next_slots: NextSlots | None = None
    rows: tuple[int, int] = (0, 0)  # of this layer among those of `next_slots`

    @property
    def device(self) -> torch.device | None:
        """Device of keys and values."""
        return self.state.store.device

    @property
    def seen(self) -> int:
        """Number of columns that the host has counted, pending ones included."""
        return self.state.seen

    # ---- compiled steps -------------------------------------------------------------------------------------------

    def join(self, next_slots: NextSlots, index: int) -> None:
        """Take compiled steps as layer `index` of a group."""
        rows = self.state.rows
        self.next_slots, self.rows = next_slots, (index * rows, (index + 1) * rows)
        if self.ring is not None:
            self.ring.make(rows, self.state.budget.now.block_size)

    def write(self, keys: Tensor, values: Tensor, kv_unchanged: bool) -> tuple[Tensor, Tensor]:
        """Take in a single token, `[B, H, 1, dim]`, in a compiled step, whose graph this is part of; returns keys and
        values for attention.

        Args:
            kv_unchanged: see `KeyOwner`.

        Raises:
            RuntimeError: the step was not prepared. ValueError: the number of rows has changed.
        """
        state, next_slots, (first, end) = self.state, self.next_slots, self.rows
        if state.recorder is not None:
            self.check_attended()
            state.recorder.expects = True
        if next_slots is None or keys.shape[0] != end - first:
            state.known.check_rows(keys.shape[0])
            raise RuntimeError(f"Layer {self.layer_idx} was left out of the forward before this one.")
        state.store.write(next_slots.slots[first:end, :, 0], keys, values)
        filling = None if next_slots.filling is None else next_slots.filling[first:end]
        carrier = state.store.carrier(keys, None, lambda: filling) if kv_unchanged and not keys.requires_grad else None
        return state.store.shown() if carrier is None else (carrier, values)

    def mask(self) -> Tensor | None:
        """The slots that the token of this step sees, `[B, 1 or kv_heads, 1, slots]` bool; None = all."""
        visible = None if self.next_slots is None else self.next_slots.visible
        return None if visible is None else visible[self.rows[0] : self.rows[1], :, None]

    def written(self) -> None:
        """Called after the host has counted a token that a compiled step has written."""
        state, store, recorder = self.state, self.state.store, self.state.recorder
        state.seen += 1
        if recorder is not None and self.ring is not None:
            table = state.known
            recorder.prepare(table, 1, None)
            held = table.held if table.may_fill_block or not store.rounds else 0  # reading would decode all tokens
            recorder.observe_step(table, self.ring.take(table.seen, store.shown(held)[0]))
        if store.rounds:
            store.wrote()

    # ---- pending tokens -------------------------------------------------------------------------------------------

    def check_attended(self) -> None:
        """Raise RuntimeError if attention has not shown the queries of the last forward."""
        recorder = self.state.recorder
        if recorder is not None and recorder.expects:
            raise recorder.untold(self.layer_idx)

    def commit(self, together: Together) -> None:
        """Take in the pending tokens, and evict as necessary."""
        self.check_attended()
        state, pending = self.state, self.state.pending
        state.pending = None
        if pending is not None and state.table is not None and pending.count:
            self.take(together, state.table, pending.keys, pending.values, pending.real, pending.shown)
        state.offered = None
        if state.recorder is not None:
            state.recorder.queries = None

    def offer(self) -> bool:
        """Tell the split what the layer could keep of its held and pending tokens; False = all of them fit."""
        self.check_attended()
        state, pending, recorder = self.state, self.state.pending, self.state.recorder
        if pending is None or recorder is None or recorder.queries is None:
            return state.offered is not None
        table, budget, count = state.known, state.budget, pending.count
        if count < 2:  # `crop` may have taken all back
            return False
        recorder.prepare(table, count, pending.real)
        positions = table.positions_with(recorder.positions).expand(-1, pending.keys.shape[1], -1)
        budget.split.attend(budget, self.local_heads, recorder.queries, positions, recorder.positions)
        if not self.overflows(table, count):
            return False
        if state.store.rounds:
            state.store.meet(pending.keys, pending.values, pending.real)
        # A score that depends on the budget waits until that is known.
        self.overflow.offer(table, pending, score=budget.split.compares or not self.needs.reads_budget)
        return True

    # ---- append, overwrite, overflow ------------------------------------------------------------------------------

    def overflows(self, table: BlockTable, count: int) -> bool:
        """Whether `count` new tokens make the layer choose anew all that it holds.

        Rows and heads keep equal budgets for as long as everything fits, so a short text takes no more storage than it
        needs.
        """
        if count > 1 and table.limits is not None:
            return True
        room = table.capacity - table.counters.held - count
        if count == 1 and room < 0:
            return False
        # Pads in the middle have to move to the lowest slots before the first slot is overwritten.
        return room < 0 or (room == 0 and self.padding.irregular)

    def take(
        self,
        together: Together,
        table: BlockTable,
        keys: Tensor,
        values: Tensor,
        real: Tensor | None,
        shown: Shown = None,
    ) -> Shown:
        """Hold new tokens; `shown`: see `Pending`. Returns all that they may attend to where that was put together,
        else None: read the store then."""
        state, count, recorder = self.state, keys.shape[2], self.state.recorder
        split, waited = state.budget.split, None if recorder is None else recorder.queries
        if count == 1 and split.foresees:
            waited = self._divide_filled(table, real, waited)
        if state.offered is None and count > 1 and state.store.rounds:
            state.store.meet(keys, values, real)
        if state.offered is None and recorder is not None:
            recorder.prepare(table, count, real)
        if count == 1 and table.counters.held == table.capacity:
            self._overwrite(together, table, keys, values, real)
        elif self.overflows(table, count):
            return self.overflow.take(table, keys, values, real, shown)
        else:
            self._append(together, table, keys, values, real)
        if waited is not None and recorder is not None and count == 1:
            recorder.observe_waiting_step(table, waited)
        return None

    def _divide_filled(self, table: BlockTable, real: Tensor | None, waited: Queries | None) -> Queries | None:
        """Single tokens have filled rows: give each of their heads its budget before the first token leaves. Returns
        `waited`, with the held keys in the order in which they lie then."""
        filled, budget = table.filled(real), self.state.budget
        rows = None if filled is None else budget.split.foresee(budget, filled, table.seen)
        if rows is None:
            return waited
        before = table.positions.clone()
        self.overflow.fit_rows(rows)
        recorder = self.state.recorder
        return waited if waited is None or recorder is None else recorder.moved(waited, before, table)

    def _append(self, together: Together, table: BlockTable, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        count, held, store = keys.shape[2], table.held, self.state.store
        store.grow(held, held + count, table.block_size, table.capacity)
        if store.rounds:
            self._append_to_encode(together, table, keys, values, real)
        else:
            store.append(held, keys, values)
            table.append(count, real)
        if self.state.recorder is not None:
            self.state.recorder.observe_appended(table, held, count)

    def _append_to_encode(
        self, together: Together, table: BlockTable, keys: Tensor, values: Tensor, real: Tensor | None
    ) -> None:
        """A single token waits for others, until a block is encoded; several are encoded at once."""
        count, held = keys.shape[2], table.held
        if count == 1 and held:
            slot = torch.full((table.rows, 1, 1), held, dtype=torch.int64, device=table.device)
            self._overwrite_to_encode(slot, keys, values, real)
            table.append(count, real)
            self._encode_block(together)
        else:
            self.scores.encode()
            table.append(count, real)
            positions = table.positions
            arrived = Arrived(positions, positions[..., held:], table.seen - table.pads)
            self.state.store.append(held, keys, values, arrived)
            self.scores.note_appended(keys, values)

    def _overwrite(
        self, together: Together, table: BlockTable, keys: Tensor, values: Tensor, real: Tensor | None
    ) -> None:
        fills = self.may_fill and real is None
        if fills or table.victims_due:
            together.begin_block(self, real)
        if fills and self.fill is not None and self.fill.write(keys, values) is not None:
            return
        slot = table.next_slots()
        if self.state.action.takes:
            self.state.evict_token(slot, table.positions_in(slot, real))
        self._overwrite_to_encode(slot, keys, values, real)  # a pad does not evict a token
        table.overwritten(real)
        self._encode_block(together)

    def _overwrite_to_encode(self, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        store = self.state.store
        if store.uncoded and self.scores.block_waits:  # after a forward that failed, or alone in its phase
            self.scores.encode()
        store.overwrite(slot, keys, values, real)

    def _encode_block(self, together: Together) -> None:
        if self.state.store.uncoded and self.scores.block_waits:
            together.encode_blocks()

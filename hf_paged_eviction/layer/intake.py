"""Take new tokens into one layer: it appends, overwrites, or chooses what stays."""

from typing import Protocol

import torch
from torch import Tensor

from ..queries.observer import Queries
from ..store.store import Arrived
from . import overflow
from .layer_state import LayerState, Shown
from .scores import block_waits, encode, note_appended


class Together(Protocol):
    """What a layer leaves to all layers of its cache."""

    def begin_block(self, state: LayerState, real: Tensor | None) -> None:
        """Choose the next blocks to overwrite, if that is due, and prepare single tokens to be written to them.

        Args:
            real: `[B, 1]` bool, rows whose next token is no pad; None = all.
        """

    def encode_blocks(self) -> None:
        """Encode the newest block of every layer."""


# ---- pending tokens -------------------------------------------------------------------------------------------------


def commit(state: LayerState, together: Together) -> None:
    """Take in the pending tokens, and evict as necessary."""
    state.check_attended()
    pending, state.pending = state.pending, None
    if pending is not None and state.table is not None and pending.count:
        take(state, together, pending.keys, pending.values, pending.real, pending.shown)
    state.offered = None
    if state.recorder is not None:
        state.recorder.queries = None


def offer(state: LayerState) -> bool:
    """Tell the split what the layer could keep of its held and pending tokens; False = all of them fit."""
    state.check_attended()
    pending, recorder = state.pending, state.recorder
    if pending is None or recorder is None or recorder.queries is None:
        return state.offered is not None
    table, budget, count = state.known, state.budget, pending.count
    if count < 2:  # `crop` may have taken all back
        return False
    recorder.prepare(table, count, pending.real)
    positions = table.positions_with(recorder.positions).expand(-1, pending.keys.shape[1], -1)
    budget.split.attend(budget, state.scorer.local_heads, recorder.queries, positions, recorder.positions)
    if not overflows(state, count):
        return False
    if state.store.rounds:
        state.store.meet(pending.keys, pending.values, pending.real)
    # A score that depends on the budget waits until that is known.
    overflow.offer(state, pending, score=budget.split.compares or not state.needs.reads_budget)
    return True


# ---- append, overwrite, overflow ------------------------------------------------------------------------------------


def overflows(state: LayerState, count: int) -> bool:
    """Whether `count` new tokens make the layer choose anew all that it holds.

    Rows and heads keep equal budgets for as long as everything fits, so a short text takes no more storage than it
    needs.
    """
    table = state.known
    if count > 1 and table.phase.limits is not None:
        return True
    room = table.capacity - table.counters.held - count
    if count == 1 and room < 0:
        return False
    # Pads in the middle have to move to the lowest slots before the first slot is overwritten.
    return room < 0 or (room == 0 and state.padding.irregular)


def take(
    state: LayerState, together: Together, keys: Tensor, values: Tensor, real: Tensor | None, shown: Shown = None
) -> Shown:
    """Hold new tokens; `shown`: see `Pending`. Returns all that they may attend to where that was put together, else
    None: read the store then."""
    table, count, recorder = state.known, keys.shape[2], state.recorder
    waited = None if recorder is None else recorder.queries
    if count == 1 and state.budget.split.foresees:
        waited = _divide_filled(state, real, waited)
    if state.offered is None and count > 1 and state.store.rounds:
        state.store.meet(keys, values, real)
    if state.offered is None and recorder is not None:
        recorder.prepare(table, count, real)
    if count == 1 and table.counters.held == table.capacity:
        _overwrite(state, together, keys, values, real)
    elif overflows(state, count):
        return overflow.take(state, keys, values, real, shown)
    else:
        _append(state, together, keys, values, real)
    if waited is not None and recorder is not None and count == 1:
        recorder.observe_waiting_step(table, waited)
    return None


def _divide_filled(state: LayerState, real: Tensor | None, waited: Queries | None) -> Queries | None:
    """Single tokens have filled rows: give each of their heads its budget before the first token leaves. Returns
    `waited`, with the held keys in the order in which they lie then."""
    table, budget, recorder = state.known, state.budget, state.recorder
    if not table.full or table.seen not in table.counters.full_at_values:
        return waited
    filled = (table.phase.full_at == table.seen).all(-1)
    rows = budget.split.foresee(budget, filled if real is None else filled & real[:, 0], table.seen)
    if rows is None:
        return waited
    before = table.positions.clone()
    overflow.fit_rows(state, rows)
    return waited if waited is None or recorder is None else recorder.moved(waited, before, table)


def _append(state: LayerState, together: Together, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
    table, store = state.known, state.store
    count, held = keys.shape[2], table.held
    store.grow(held, held + count, table.block_size, table.capacity)
    if store.rounds:
        _append_to_encode(state, together, keys, values, real)
    else:
        store.append(held, keys, values)
        table.append(count, real)
    if state.recorder is not None:
        state.recorder.observe_appended(table, held, count)


def _append_to_encode(state: LayerState, together: Together, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
    """A single token waits for others, until a block is encoded; several are encoded at once."""
    table, count = state.known, keys.shape[2]
    held = table.held
    if count == 1 and held:
        slot = torch.full((table.rows, 1, 1), held, dtype=torch.int64, device=table.device)
        _overwrite_to_encode(state, slot, keys, values, real)
        table.append(count, real)
        _encode_block(state, together)
    else:
        encode(state)
        table.append(count, real)
        positions = table.positions
        arrived = Arrived(positions, positions[..., held:], table.seen - table.pads)
        state.store.append(held, keys, values, arrived)
        note_appended(state, keys, values)


def _overwrite(state: LayerState, together: Together, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
    table, fills = state.known, state.may_fill and real is None
    if fills or table.counters.victims_due:
        together.begin_block(state, real)
    if fills and state.fill is not None and state.fill.write(table, keys, values) is not None:
        return
    slot = table.next_slots()
    if state.action.takes:
        # These tokens are older than the choice of the block, so their positions are stored.
        positions = table.tokens.positions.gather(-1, slot)
        state.evict_token(slot, positions if real is None else positions.masked_fill(~real[..., None], -1))
    _overwrite_to_encode(state, slot, keys, values, real)  # a pad does not evict a token
    table.overwritten(real)
    _encode_block(state, together)


def _overwrite_to_encode(state: LayerState, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
    if state.store.uncoded and block_waits(state):  # after a forward that failed, or alone in its phase
        encode(state)
    state.store.overwrite(slot, keys, values, real)


def _encode_block(state: LayerState, together: Together) -> None:
    if state.store.uncoded and block_waits(state):
        together.encode_blocks()

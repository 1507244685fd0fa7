"""One forward of a layer: its tokens are used, and then it appends, overwrites, or chooses what stays.

`kv_unchanged` is that of the layer, see `KeyOwner`.
"""

from functools import partial

import torch
from torch import Tensor

from ..attention.in_order import InOrder, note
from ..queries.observer import Queries
from ..queries.recorder import QueryRecorder
from ..queries.ring import QueryRing
from ..store.pending import Pending
from ..store.store import Arrived, no_mask
from ..table.table import BlockTable
from ..tensors.graphs import outside_graphs
from . import overflow
from .gradients import refuse_gradients
from .layer_state import LayerState, Shown
from .plan import Plan
from .scores import block_waits, encode, note_appended

States = tuple[Tensor, Tensor]


def admit(state: LayerState, keys: Tensor, values: Tensor) -> None:
    """Check new keys and values against the held ones.

    Raises:
        TypeError, ValueError: see `StateKind`. RuntimeError: see `ExposedStates`.
    """
    if state.exposed.states:
        state.exposed.check()
    state.store.dtype = state.arrivals.check(keys, values).dtype


def receive(state: LayerState, plan: Plan, keys: Tensor, values: Tensor, kv_unchanged: bool) -> States:
    """Take in new tokens; returns what they attend to, see `PagedLayer.update`."""
    take_in = _step if plan.static else _take_in
    if not keys.requires_grad or torch.compiler.is_compiling():
        return take_in(state, plan, keys, values, kv_unchanged)
    single, later = keys.shape[2] == 1 and state.store.rounds, state.came_with_gradients
    attended = take_in(state, plan, keys, values, kv_unchanged)
    state.came_with_gradients = True
    return refuse_gradients(attended, keys) if single or later else attended


def _step(state: LayerState, plan: Plan, keys: Tensor, values: Tensor, kv_unchanged: bool) -> States:
    """As `_take_in`, of a static cache."""
    if keys.shape[2] != 1 or state.table is None:
        return _interrupt(state, plan, keys, values, kv_unchanged)
    if not plan.ready:
        plan.check_ready()
    attended = state.write(keys, values, kv_unchanged)
    plan.took(state)
    return attended


@outside_graphs
def _interrupt(state: LayerState, plan: Plan, keys: Tensor, values: Tensor, kv_unchanged: bool) -> States:
    plan.interrupt()
    return _take_in(state, plan, keys, values, kv_unchanged)


def _take_in(state: LayerState, plan: Plan, keys: Tensor, values: Tensor, kv_unchanged: bool) -> States:
    state.check_attended()
    attended = _use_then_evict(state, plan, keys, values, kv_unchanged)
    state.seen += keys.shape[2]
    return _expecting(state, keys, attended)


def filled(state: LayerState, keys: Tensor, values: Tensor, kv_unchanged: bool) -> States:
    """What a single token attends to that was written to its block."""
    return _expecting(state, keys, _shown(state, keys, values, kv_unchanged))


def _expecting(state: LayerState, new: Tensor, attended: States) -> States:
    """The tokens with these `new` keys attend to what is returned; attention has to show their queries, if there is a
    recorder."""
    if state.recorder is None:
        return attended
    keys, values = attended
    if new.shape[2]:
        state.recorder.expects = True
    if state.own_mask and keys is not new and not state.store.copies and keys is state.store.shown()[0]:
        keys = keys[:]  # attention attaches a mask to them, which the storage must not keep
    return keys, values


def _use_then_evict(state: LayerState, plan: Plan, new_keys: Tensor, new_values: Tensor, kv_unchanged: bool) -> States:
    keys, values = state.store.detached(new_keys, new_values)
    count, recorder = keys.shape[2], state.recorder
    if count == 0:
        return state.shown_with(state.held, keys, values)
    if state.pending is not None:
        commit(state, plan)
    elif recorder is not None:
        recorder.queries = None
    table = state.table
    if table is None:
        table = state.start(keys, values)
        if keys.shape[0] > 1:
            state.padding.warn_if_unknown()
    else:
        table.check_rows(keys.shape[0])
    seen, held, needs_gradient = state.seen, table.counters.held, new_keys.requires_grad
    real = state.padding.columns(seen, seen + count, keys.shape[0], keys.device)
    if state.recording or (recorder is not None and (count > 1 or overflows(state, count))):
        shown = state.shown_with(held, new_keys, new_values, real)
        if count > 1 and held and real is None and state.own_mask and not needs_gradient:
            _note_order(state, table, shown[0], held, count)
        # They are committed as soon as attention has come; and encoding, or a change of dtype, would change them.
        encodes = state.store.rounds and (count == 1 or state.store.uncoded or state.store.young)
        stays = not (state.recording or encodes) and keys is new_keys and values is new_values
        state.pending, state.fill = Pending(keys, values, real, shown if stays else None), None
        return shown
    if count == 1 or (seen and not needs_gradient and not state.store.rounds):
        attended = take(state, plan, keys, values, real)
        in_place = count == 1 and not needs_gradient
        return attended or _shown(state, keys, values, kv_unchanged and in_place)
    # The caller's own tensors carry a gradient and are not rounded, which those of the storage may be.
    attended = state.shown_with(held, new_keys, new_values)
    take(state, plan, keys, values, real)
    return attended


def _note_order(state: LayerState, table: BlockTable, shown: Tensor, held: int, count: int) -> None:
    """Note on keys for attention that its queries see all held tokens, if that is known without reading a tensor."""
    lengths = state.store.columns.layout.lengths
    whole = table.all_used if lengths is not None else table.all_real
    if whole and shown.is_cpu and not state.action.reads:
        note(shown, InOrder(held, count, lengths))


def _shown(state: LayerState, keys: Tensor, values: Tensor, in_place: bool) -> States:
    """What tokens attend to that are held now; `in_place`: attention may be given the storage in its own form."""
    table = state.known
    carrier = _carrier(state, keys, table) if in_place else None
    if carrier is not None:
        return carrier, values
    return state.store.shown(None if table.full else table.held)


def _carrier(state: LayerState, keys: Tensor, table: BlockTable) -> Tensor | None:
    """See `Store.carrier`. None also where observers, or what is attended to beside the keys, need all of them; of a
    store that rounds, observers get decoded keys from `_observe`."""
    observed = state.needs.queries and table.counters.may_fill_block
    if state.action.reads or (observed and not state.store.rounds) or torch.compiler.is_compiling():
        return None
    recorder = state.recorder
    hides = state.own_mask and recorder is not None and not table.all_used
    visible = partial(_visible, recorder, table) if hides and recorder is not None else no_mask
    return state.store.carrier(keys, None if table.full else table.held, visible)


def _visible(recorder: QueryRecorder, table: BlockTable) -> Tensor | None:
    """`[B, 1 or H, held]` bool, the slots that the single token of this forward attends to; None = all."""
    mask = recorder.mask(table, None, 1)
    return None if mask is None else mask[:, :, 0]


# ---- attention ------------------------------------------------------------------------------------------------------


def attended(state: LayerState, plan: Plan, recorder: QueryRecorder, queries: Queries) -> None:
    """Attention has shown the queries of the last forward, and the keys that they were compared with."""
    ring = state.ring
    if plan.joined and queries.query.shape[2] == 1:
        if ring is not None:
            ring.put(plan.seen[state.device], queries.query)
        recorder.expects = False
    elif ring is None:
        _observe(state, plan, recorder, queries)
    else:
        _several_attended(state, plan, recorder, ring, queries)


@outside_graphs
def _several_attended(
    state: LayerState, plan: Plan, recorder: QueryRecorder, ring: QueryRing, queries: Queries
) -> None:
    ring.note(queries)
    _observe(state, plan, recorder, queries)


def _observe(state: LayerState, plan: Plan, recorder: QueryRecorder, queries: Queries) -> None:
    recorder.expects = False
    if state.pending is None:
        if not (plan.static or queries.key.shape[2]):  # keys are decoded when all layers have come so far
            recorder.observer.keep(queries, recorder.real)
            plan.observe_blocks(state)
            return
        plan.count_step()
        recorder.observe_step(state.known, queries)
        return
    recorder.queries = queries
    if not state.recording:
        _all_attended(state, plan)


def _all_attended(state: LayerState, plan: Plan) -> None:
    """Attention has shown the queries of the pending tokens of this layer: take them in, at once or with those of all
    layers."""
    if not (state.budget.table.waits and offer(state)):
        commit(state, plan)
    elif state is plan.layers[-1]:
        commit_all(plan)


# ---- pending tokens -------------------------------------------------------------------------------------------------


def commit_all(plan: Plan) -> None:
    """Take in the pending tokens of all layers, and evict as necessary; budgets that depend on all layers are decided
    before that."""
    limits = plan.layers[0].budget.table if plan.layers else None
    if limits is not None and limits.waits and all([offer(layer) for layer in plan.layers]):
        offered = plan.layers[0].offered
        if offered is not None:
            limits.settle(offered.real)
    for layer in plan.layers:
        commit(layer, plan)


def commit(state: LayerState, plan: Plan) -> None:
    """Take in the pending tokens, and evict as necessary."""
    state.check_attended()
    pending, state.pending = state.pending, None
    if pending is not None and state.table is not None and pending.count:
        take(state, plan, pending.keys, pending.values, pending.real, pending.shown)
    state.offered = None
    if state.recorder is not None:
        state.recorder.queries = None


def offer(state: LayerState) -> bool:
    """Tell the table of limits what the layer could keep of its held and pending tokens; False = all of them fit."""
    state.check_attended()
    pending, recorder = state.pending, state.recorder
    if pending is None or recorder is None or recorder.queries is None:
        return state.offered is not None
    table, budget, count = state.known, state.budget, pending.count
    if count < 2:  # `crop` may have taken all back
        return False
    recorder.prepare(table, count, pending.real)
    positions = table.positions_with(recorder.positions).expand(-1, pending.keys.shape[1], -1)
    local_heads, all_real = state.scorer.local_heads, recorder.real is None
    budget.table.attend(budget, local_heads, recorder.queries, positions, recorder.positions, all_real)
    if not overflows(state, count):
        return False
    if state.store.rounds:
        state.store.meet(pending.keys, pending.values, pending.real)
    # A score that depends on the budget waits until that is known.
    overflow.offer(state, pending, score=not state.needs.reads_budget)
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
    state: LayerState, plan: Plan, keys: Tensor, values: Tensor, real: Tensor | None, shown: Shown = None
) -> Shown:
    """Hold new tokens; `shown`: see `Pending`. Returns all that they may attend to where that was put together, else
    None: read the store then."""
    table, count, recorder = state.known, keys.shape[2], state.recorder
    waited = None if recorder is None else recorder.queries
    limits = state.budget.table
    if count == 1 and limits.foreseen is not None and limits.foresees(table.counters.seen):
        waited = _divide_filled(state, real, waited)
    if state.offered is None and recorder is not None:
        recorder.prepare(table, count, real)
    if count == 1 and table.counters.held == table.capacity:
        _overwrite(state, plan, keys, values, real)
    elif overflows(state, count):
        return overflow.take(state, keys, values, real, shown)
    else:
        _append(state, plan, keys, values, real)
    if waited is not None and recorder is not None and count == 1:
        recorder.observe_waiting_step(table, waited)
    return None


def _divide_filled(state: LayerState, real: Tensor | None, waited: Queries | None) -> Queries | None:
    """Single tokens have filled rows: give each of their heads its budget before the first token leaves. Returns
    `waited`, with the held keys in the order in which they lie then."""
    table, budget, recorder = state.known, state.budget, state.recorder
    if not table.full or table.seen not in table.counters.full_at_values:
        return waited
    state.divided_at = table.seen
    filled = (table.phase.full_at == table.seen).all(-1)
    rows = budget.table.foresee(budget, filled if real is None else filled & real[:, 0], table.seen)
    if rows is None:
        return waited
    before = table.positions.clone()
    overflow.fit_rows(state, rows)
    return waited if waited is None or recorder is None else recorder.moved(waited, before, table)


def _append(state: LayerState, plan: Plan, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
    table, store = state.known, state.store
    count, held = keys.shape[2], table.held
    if count == 1 and real is None and state.may_fill and held + 1 < table.capacity and not state.exposed.states:
        plan.begin_appending(state)
        if state.fill is not None and state.fill.write(table, keys, values) is not None:
            _encode_block(state, plan)
            return
    state.fill = None
    store.grow(held, held + count, table.block_size, table.capacity)
    if store.rounds:
        _append_to_encode(state, plan, keys, values, real)
    else:
        store.append(held, keys, values)
        table.append(count, real)
    if state.recorder is not None:
        state.recorder.observe_appended(table, held, count)


def _append_to_encode(state: LayerState, plan: Plan, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
    """A single token waits for others, until a block is encoded; several are encoded at once."""
    table, count = state.known, keys.shape[2]
    held = table.held
    if count == 1:
        slot = torch.full((table.rows, 1, 1), held, dtype=torch.int64, device=table.device)
        _overwrite_to_encode(state, slot, keys, values, real)
        table.append(count, real)
        _encode_block(state, plan)
    else:
        state.store.meet(keys, values, real)
        encode(state)
        table.append(count, real)
        positions = table.positions
        arrived = Arrived(positions, positions[..., held:], table.seen - table.pads, several=real is None)
        state.store.append(held, keys, values, arrived)
        note_appended(state, keys, values)


def _overwrite(state: LayerState, plan: Plan, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
    table, fills = state.known, state.may_fill and real is None
    if fills or table.counters.victims_due:
        plan.begin_block(state, real)
    if fills and state.fill is not None and state.fill.write(table, keys, values) is not None:
        _encode_block(state, plan)
        return
    slot = table.next_slots()
    if state.action.acts:
        # These tokens are older than the choice of the block, so their positions are stored.
        positions = table.tokens.positions.gather(-1, slot)
        state.evict_token(slot, positions if real is None else positions.masked_fill(~real[..., None], -1))
    _overwrite_to_encode(state, slot, keys, values, real)  # a pad does not evict a token
    table.overwritten(real)
    _encode_block(state, plan)


def _overwrite_to_encode(state: LayerState, slot: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
    if state.store.uncoded and block_waits(state):  # after a forward that failed, or alone in its phase
        encode(state)
    state.store.overwrite(slot, keys, values, real)


def _encode_block(state: LayerState, plan: Plan) -> None:
    if state.store.uncoded and block_waits(state):
        plan.encode_blocks()

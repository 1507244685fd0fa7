"""One forward of a layer: its tokens are used, then evicted. `kv_unchanged` is that of the layer, see `KeyOwner`."""

from functools import partial

import torch
from torch import Tensor

from ..graphs import outside_graphs
from ..queries.observer import Queries
from ..queries.recorder import QueryRecorder
from ..static.ring import QueryRing
from ..store.pending import Pending
from ..store.store import no_mask
from ..table.table import BlockTable
from .gradients import refuse_gradients
from .intake import commit, overflows, take
from .layer_state import LayerState
from .plan import Plan

States = tuple[Tensor, Tensor]


def admit(state: LayerState, keys: Tensor, values: Tensor) -> None:
    """Check new keys and values against the held ones.

    Raises:
        TypeError, ValueError: see `StateKind`. RuntimeError: see `ExposedStates`.
    """
    if state.exposed.states:
        state.exposed.check()
    # After a disposal has taken tokens, and with a budget in bytes, those that are held keep their dtype.
    dtype = state.arrivals.check(keys, values, state.may_widen and state.memory is None).dtype
    if dtype != state.store.dtype and state.table is not None:
        if state.pending is not None:
            state.pending = state.pending.wider(dtype)
        state.store.widen(dtype)
    state.store.dtype = dtype


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


def filled(state: LayerState, recorder: QueryRecorder, keys: Tensor, values: Tensor, kv_unchanged: bool) -> States:
    """A single token was written, and attention will show its query."""
    recorder.prepare(state.known, 1, None)
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
        # They are committed as soon as attention has come; and encoding, or a change of dtype, would change them.
        stays = not (state.recording or state.store.rounds) and keys is new_keys and values is new_values
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


def _shown(state: LayerState, keys: Tensor, values: Tensor, in_place: bool) -> States:
    """What tokens attend to that are held now; `in_place`: attention may be given the storage in its own form."""
    table = state.known
    carrier = _carrier(state, keys, table) if in_place else None
    if carrier is not None:
        return carrier, values
    return state.store.shown(None if table.full else table.held)


def _carrier(state: LayerState, keys: Tensor, table: BlockTable) -> Tensor | None:
    """See `Store.carrier`. None also where observers, or what is attended to beside the keys, need all of them."""
    observed = state.needs.queries and table.counters.may_fill_block
    if state.action.reads or observed or torch.compiler.is_compiling():
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
        plan.count_step()
        recorder.observe_step(state.known, queries)
        return
    recorder.queries = queries
    if not state.recording:
        plan.attended(state)

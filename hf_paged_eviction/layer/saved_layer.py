"""A paged layer in a file."""

import torch

from ..store.arriving import StateKind
from ..table import saved_table
from ..tensors.saved import StateDict
from .layer_state import LayerState
from .paged import PagedLayer


def state_of(layer: PagedLayer) -> StateDict:
    """The state of a layer.

    Raises:
        ValueError: tokens wait for `crop`. RuntimeError: the last forward failed in the middle.
    """
    state, plan = layer.state, layer.plan
    state.exposed.check()
    if plan.static:
        plan.count_whole_step()
    if state.waiting:
        raise ValueError(
            f"{state.waiting} tokens wait for crop() to say whether they stay: call cache.crop(0), which keeps them, "
            "or cache.crop(-n) first."
        )
    if state.table is None:
        return {"kv_unchanged": layer.kv_unchanged}
    layer.commit()
    return {
        "kv_unchanged": layer.kv_unchanged,
        "heads": _heads(state, state.heads),
        "store": state.store.state_dict(state.held),
        "table": saved_table.state_of(state.known),
        "observer": None if state.recorder is None else state.recorder.observer.state_dict(),
        "action": state.action.state_dict(),
        "ring": None if state.ring is None else state.ring.state_dict(),
        "all_real": plan.all_real if plan.joined else None,
    }


def _heads(state: LayerState, heads: int) -> list[int]:
    """The number of processes, and the first of this layer's heads in this one."""
    local = state.scorer.local_heads
    return [local.processes(heads), local.first_head(heads)]


def load(layer: PagedLayer, saved: StateDict, rows: int, device: torch.device) -> bool | None:
    """Restore the state of a layer with the same options, with so many rows.

    Returns:
        Whether single tokens need no mask in the run of compiled steps of the saved layer; None = it was in no run.

    Raises:
        ValueError, KeyError: it does not fit.
    """
    state = layer.state
    layer.is_initialized, layer.kv_unchanged = True, saved["kv_unchanged"]
    state.arrivals.kind = _load_parts(state, saved, rows, device)
    if state.ring is not None:
        state.ring.load_state(saved["ring"])
    return saved.get("all_real") if layer.plan.static else None


def _load_parts(state: LayerState, saved: StateDict, rows: int, device: torch.device) -> StateKind:
    counters, budget = saved["table"]["counters"], state.budget
    capacity = saved["table"]["tokens"]["positions"].shape[-1]
    budget.resize(capacity)
    kind = state.store.load_state(saved["store"], rows, counters["held"], capacity, device)
    budget.check(kind.heads, state.scorer.local_heads)
    process = _heads(state, kind.heads)
    if saved["heads"] != process:
        raise ValueError(
            f"it was saved by a process with head {saved['heads'][1]} and the next, one of {saved['heads'][0]}; this "
            f"one has head {process[1]} and is one of {process[0]}"
        )
    state.seen = counters["seen"]
    state.table = table = state.new_table(budget.now, rows, state.scorer.sets(kind.heads), device)
    saved_table.load(table, saved["table"])
    if state.recorder is not None:
        state.recorder.observer.load_state(saved["observer"], kind, rows, capacity)
    state.action.start(table)
    state.action.load_state(saved.get("action"), kind)
    return kind

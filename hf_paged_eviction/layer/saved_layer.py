"""A paged layer in a file."""

from typing import Any

import torch

from ..table import saved_table
from ..tensors.saved import StateDict, restore, state_of
from .layer_state import LayerState
from .paged import PagedLayer


def saved_state(layer: PagedLayer) -> StateDict:
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
    if state.action.acts and not state.action.STATE:
        raise ValueError(f"{type(state.action).__name__}.STATE does not say what it keeps of evicted tokens")
    return {
        "kv_unchanged": layer.kv_unchanged,
        "heads": _heads(state, state.heads),
        "store": state.store.state_dict(state.held),
        "table": saved_table.state_of(state.known),
        "all_real": plan.all_real if plan.joined else None,
        **{name: state_of(part) for name, part in _walked(state).items()},
    }


def _walked(state: LayerState) -> dict[str, Any]:
    """The parts that say by `STATE` what they hold."""
    observer = None if state.recorder is None else state.recorder.observer
    parts = {"observer": observer, "action": state.action, "ring": state.ring}
    return {name: part for name, part in parts.items() if part is not None}


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
    state, budget = layer.state, layer.state.budget
    layer.is_initialized, layer.kv_unchanged = True, saved["kv_unchanged"]
    budget.resize(saved["table"]["tokens"]["positions"].shape[-1])
    capacity, held = budget.now.capacity, saved["table"]["counters"]["held"]
    kind = state.arrivals.kind = state.store.load_state(saved["store"], rows, held, capacity, device)
    budget.check(kind.heads, state.scorer.local_heads)
    if saved["heads"] != (here := _heads(state, kind.heads)):
        raise ValueError(f"[processes, first KV head] of a layer are {saved['heads']} in the file, {here} here")
    state.seen = saved["table"]["counters"]["seen"]
    state.table = table = state.new_table(budget.now, rows, state.scorer.sets(kind.heads), device)
    saved_table.load(table, saved["table"])
    if state.recorder is not None:
        state.recorder.observer.start(rows, kind.heads, capacity, device)
    state.action.start(table)
    for name, part in _walked(state).items():
        restore(part, saved[name])
    return saved["all_real"] if layer.plan.static else None

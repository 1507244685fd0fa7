"""A paged layer in a file."""

from torch import Tensor

from ..store.arriving import StateKind
from ..table import saved_table
from ..tensors.saved import SavedState, StateDict
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
    unchanged: StateDict = {"kv_unchanged": layer.kv_unchanged}
    if state.table is None:
        return unchanged
    layer.commit()
    if not plan.static:
        return {**_parts(state), **unchanged}
    ring = None if state.ring is None else state.ring.state_dict()
    return {**_parts(state), **unchanged, "ring": ring, "all_real": plan.all_real if plan.joined else None}


def _parts(state: LayerState) -> StateDict:
    table, local = state.known, state.scorer.local_heads
    return {
        "budget": state.budget.now.tokens,
        "held": table.held,
        "seen": table.seen,
        "processes": local.processes(state.heads),
        "first_head": local.first_head(state.heads),
        "store": state.store.state_dict(table.held),
        "table": saved_table.state_of(table),
        "observer": None if state.recorder is None else state.recorder.observer.state_dict(),
        "action": state.action.state_dict(),
    }


def load(layer: PagedLayer, saved: SavedState, rows: int, seen: int) -> bool | None:
    """Restore the state of a layer with the same options, with so many rows and columns.

    Returns:
        Whether single tokens need no mask in the run of compiled steps of the saved layer; None = it was in no run.

    Raises:
        ValueError: it does not fit.
    """
    state = layer.state
    state.arrivals.kind = kind = _load_parts(state, saved, rows, seen)
    layer.is_initialized, layer.kv_unchanged = True, saved.flag("kv_unchanged")
    if not layer.plan.static:
        return None
    if state.ring is not None:
        state.ring.load_state(saved.part("ring"), kind, state.scorer.local_heads.latent)
    return saved.flag("all_real") if saved.has("all_real") else None


def _load_parts(state: LayerState, saved: SavedState, rows: int, seen: int) -> StateKind:
    saved.need(bool(saved.keys()), "it has no tokens, and others have")
    budget, local, in_table = state.budget, state.scorer.local_heads, saved.part("table")
    capacity = _load_budget(state, saved, in_table.peek("positions", 3))
    state.seen, held = saved.number("seen", seen, seen), saved.number("held", 1, capacity)
    kind = state.store.load_state(saved.part("store"), rows, held, capacity, budget.now.block_size)
    heads, sets = kind.heads, state.scorer.sets(kind.heads)
    budget.check(heads, local)
    process = local.processes(heads), local.first_head(heads)
    there = saved.value("processes", int), saved.value("first_head", int)
    saved.need(
        process == there,
        f"it was saved by a process with head {there[1]} and the next, one of {there[0]}; this one has head "
        f"{process[1]} and is one of {process[0]}",
    )
    state.table = table = state.new_table(budget.now, rows, sets, saved.device)
    saved_table.load(table, in_table, held, seen, budget.table.unequal)
    lengths, limits = state.store.columns.layout.lengths, table.limits
    same = lengths is None or (limits is not None and limits.expand(-1, heads).flatten().tolist() == lengths)
    saved.need(same, "rows and heads hold other numbers of tokens than they may")
    if state.recorder is not None:
        state.recorder.observer.load_state(saved.part("observer"), kind, rows, capacity, seen)
    state.action.start(table)
    state.action.load_state(saved.part("action") if saved.has("action") else None, kind)
    return kind


def _load_budget(state: LayerState, saved: SavedState, positions: Tensor) -> int:
    """The number of slots of a saved table, which must be that of the budget."""
    budget, sizes, capacity = state.budget, state.budget.now, positions.shape[-1]
    saved.need(positions.numel() > 0, "it has no positions")
    saved.need(saved.value("budget", int) == capacity, f"its table has {capacity} slots, and its budget is another")
    size = sizes.block_size
    saved.need(capacity % size == 0, f"its budget {capacity} is no multiple of the block size {size}")
    saved.need(capacity >= sizes.smallest, f"its budget {capacity} is below the smallest, {sizes.smallest}")
    fits = budget.table.unequal or sizes.tokens in (None, capacity)
    saved.need(fits, f"its budget is {capacity}, and the settings make it {sizes.tokens}")
    budget.resize(capacity)
    return capacity

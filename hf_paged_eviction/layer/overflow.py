"""Evict token by token: after a forward of several tokens, or for a smaller budget.

The best tokens stay; the action of the layer handles the others. Single tokens evict whole blocks, see `Group`. Scores
and positions are `[B, S, tokens]`, positions -1 for pads.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..disposals import Held
from ..ranking import KEEP, best_tokens, best_within, not_kept, rank_keys
from ..store.pending import Offered, Pending
from ..store.store import Arrived
from ..store.tensors import with_new
from ..table.bounds import smallest_budget
from ..table.moves import empty_out, replace_rows, resize
from ..table.shifts import moved_shifts
from ..table.table import BlockTable
from .layer_state import LayerState, Shown
from .scores import encode, of_overflow, refresh


def take(
    state: LayerState, keys: Tensor, values: Tensor, real: Tensor | None, shown: Shown = None
) -> tuple[Tensor, Tensor]:
    """Keep the best of the held tokens and of these new ones `[B, H, n, dim]`; see `PagedLayer.update`.

    Args:
        real: `[B, n]` bool, False for pads among the new tokens; None = all are real.
        shown: what is returned, where it is known already.

    Returns:
        Keys and values of all of them, for attention: `[B, H, held + n, dim]`.
    """
    table, store, recorder, limits = state.known, state.store, state.recorder, state.budget.table
    held, count, offered = table.counters.held, keys.shape[2], state.offered
    if store.rounds and offered is None:  # else they have been met
        store.meet(keys, values, real)
    encode(state)
    arriving = None if recorder is None or count == 1 else recorder.positions
    positions = table.positions_with(table.new_positions(count, real)[:, 0] if arriving is None else arriving)
    if limits.unequal and offered is None:  # else they are settled already
        limits.divide(state.budget, positions[:, 0].amax(-1) + 1)
    attended = full_k, full_v = shown or state.shown_with(held, keys, values, real)
    if held and store.turns:
        full_k, full_v = with_new(store.read(held), keys, values)
    scores = None if offered is None else offered.scores
    if scores is None:
        scores = of_overflow(state, full_k, full_v, positions, count)
    _keep_best(state, Held(full_k, full_v, positions), scores, count, real)
    return attended


def offer(state: LayerState, pending: Pending, score: bool) -> None:
    """Tell the table of limits which of the held and the pending tokens could stay; `score`: score them now, and forget
    their queries."""
    table, recorder = state.known, state.recorder
    if recorder is None:
        raise RuntimeError("Only a layer that sees attention waits for the others.")
    encode(state)
    held, scores = table.counters.held, None
    positions = table.positions_with(recorder.positions)
    if score:
        shown = None if state.store.turns else pending.shown
        full_k, full_v = shown or with_new(state.store.read(held), pending.keys, pending.values)
        scores = of_overflow(state, full_k, full_v, positions, pending.count)
        # As large as all that is held: the layers that wait do not keep so much, but put it together again.
        recorder.queries, state.pending = None, replace(pending, shown=None)
    state.offered = Offered(positions[:, 0].amax(-1) + 1, scores)


# ---- another budget, other spans ------------------------------------------------------------------------------------


def shrink(state: LayerState) -> None:
    """The budget is lower now: evict the excess at once, and make the storage smaller. No tokens may be pending.

    Queries of the block that is being filled are observed at the end of the next block.
    """
    state.exposed.check()
    state.memory = None
    if state.table is None:
        state.store.columns.use({})  # room of an earlier prompt
    else:
        _refit(state, anew=False)


def cut_anew(state: LayerState) -> None:
    """Divide the held tokens into blocks again, and let shares change, after other spans were protected.

    This is necessary because the block that was being overwritten may hold a token that is protected now.
    """
    if state.table is not None and state.table.full:
        _refit(state, anew=True)


def _refit(state: LayerState, anew: bool) -> None:
    state.store.prefetch()
    fit(state, anew=anew)
    if state.recorder is not None:
        state.recorder.observer.delay()


def protected_gone(state: LayerState) -> int:
    """Number of protected tokens that came and are not held, in the row and head with most of them. Reads tensors."""
    table = state.table
    if table is None:
        return 0
    text = torch.arange(table.seen, device=table.device)
    came = table.protected(text.expand(table.rows, -1)) & (text < table.next_positions[:, None])
    return int((came.sum(-1, keepdim=True) - table.protected(table.positions).sum(-1)).max())


def fit(state: LayerState, *, anew: bool = False) -> None:
    """Adapt tokens and storage to a budget that has changed; `anew`: divide the tokens into blocks again even if none
    has to be evicted."""
    encode(state)
    table, store, capacity = state.known, state.store, state.budget.now.capacity
    if state.budget.table.unequal:
        _fit_unequal(state, anew)
    elif table.capacity == capacity and not anew:
        return
    elif table.held >= capacity:
        refresh(state)
        _keep_best(state, Held(*store.read(table.held), table.positions), table.scores, 0, None)
    else:
        if store.slots > capacity:
            store.columns.resize(capacity, table.held)
        resize(table, capacity)
        state.settle(table, None)


def _fit_unequal(state: LayerState, anew: bool) -> None:
    table, scores = state.known, _scores_of_held(state)
    positions = table.positions
    limits = _limits(state, scores, positions, _protected(state, table, positions))
    if limits is not None and (anew or table.limits is None or not torch.equal(limits, table.limits)):
        _keep_best(state, Held(*state.store.read(table.held), positions), scores, 0, None)
    state.budget.resize(table.capacity)


def fit_rows(state: LayerState, rows: Tensor) -> None:
    """Like `fit`, for the rows `[B]` bool only; the other rows do not change."""
    encode(state)
    table, scores = state.known, _scores_of_held(state)
    _keep_best(state, Held(*state.store.read(table.held), table.positions), scores, 0, None, rows=rows)


def _scores_of_held(state: LayerState) -> Tensor:
    refresh(state)
    return state.known.scores


# ---- the choice -----------------------------------------------------------------------------------------------------


def _keep_best(
    state: LayerState, tokens: Held, scores: Tensor, count: int, real: Tensor | None, rows: Tensor | None = None
) -> None:
    """Keep the best of these tokens, the held ones followed by `count` new ones; `rows`: see `fit_rows`."""
    table, positions = state.known, tokens.positions
    store, action, budget = state.store, state.action, state.budget
    held, seen = table.counters.held, table.counters.seen
    protected = _protected(state, table, positions)
    limits = _limits(state, scores, positions, protected)
    if limits is not None:
        size = budget.now.block_size
        budget.resize(-(-int(limits.max()) // size) * size)
    kept_indices, kept_positions = _choose(state, scores, positions, protected, limits)
    if rows is not None:
        kept_indices, kept_positions = _of_rows(rows, kept_indices, kept_positions, positions)
    turns = store.rerotation is not None
    shifts = moved_shifts(table, kept_indices, kept_positions, positions, count) if turns else None
    if action.acts:
        leaves = not_kept(positions, kept_indices, kept_positions)
        offered = Held(tokens.keys, tokens.values, positions.expand_as(leaves), scores)
        tokens, chosen = action.overflow(offered, leaves, kept_indices)
        if chosen is not kept_indices:
            kept_indices, kept_positions = chosen, positions.gather(-1, chosen)
    came = count if real is None else real.sum(-1)
    several = count > 1 and real is None
    arrived = Arrived(kept_positions, positions[..., held:], seen - table.phase.pads + came, limits, several)
    store.keep(tokens.keys, tokens.values, kept_indices, held, arrived, views=count == 0)
    scores = scores.gather(-1, kept_indices)
    scored = scores if state.needs.token_local else None
    if rows is not None and limits is not None:
        replace_rows(table, rows, kept_positions, scored, limits, shifts)
    else:
        table.replace(kept_positions, scored, count, real, limits, shifts)
    if turns:
        state.rerotate_keys()
    state.settle(table, kept_indices)


def _choose(
    state: LayerState, scores: Tensor, positions: Tensor, protected: Tensor, limits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Indices of the tokens that stay, and their positions, both `[B, S, C]` in slot order."""
    sizes = state.budget.now
    if limits is not None:
        return best_within(_rank(state, scores, positions, protected), positions, limits, sizes.capacity)
    kept_indices = best_tokens(_rank(state, scores, positions, protected), positions, sizes.capacity)
    return kept_indices, positions.gather(-1, kept_indices)


def _limits(state: LayerState, scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor | None:
    """`[B, S]` number of these tokens that may stay; None = the same number in all sets."""
    budget = state.budget
    if not budget.table.unequal:
        return None
    pinned = scores.masked_fill(protected, float("inf")).masked_fill(positions < 0, float("-inf"))
    return budget.max_tokens(pinned, positions, smallest_budget(state.known.phase.bounds, budget.now))


def _protected(state: LayerState, table: BlockTable, positions: Tensor) -> Tensor:
    """Bool: the newest tokens of the row, and the tokens in protected spans; the start of the row is such a span."""
    return table.protected(positions) | _newest(state, positions)


def _newest(state: LayerState, positions: Tensor) -> Tensor:
    """Bool: the newest tokens of the row."""
    before = positions.amax(-1, keepdim=True) - state.budget.now.recent
    return (positions >= 0) & (positions > before)


def _rank(state: LayerState, scores: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
    """`[B, S, tokens]` int64: the order of eviction, protected tokens last."""
    valid, noise = (positions >= 0).expand_as(scores), state.needs.absolute_noise
    return rank_keys(scores, positions, valid, noise).masked_fill(protected, KEEP)


def with_lowest(state: LayerState, gone: Tensor, missing: Tensor) -> Tensor:
    """These slots `[B, S, held]` bool, and in each set so many more `[B, S]`: tokens that go first, even if
    they are protected. First by rank, then the oldest of the newest tokens, then the oldest in a protected span."""
    table = state.known
    fixed, newest = table.protected(table.positions), _newest(state, table.positions)
    empty_out(table, gone)
    scores = _scores_of_held(state)
    positions = table.positions
    rank = _rank(state, scores, positions, torch.zeros_like(newest))
    rank = torch.where(newest, KEEP - 2**40 + positions, rank)
    rank = torch.where(fixed, KEEP - 2**39 + positions, rank)
    place = rank.masked_fill(positions < 0, KEEP).argsort(stable=True, dim=-1).argsort(-1)
    return gone | (place < missing[..., None])


def _of_rows(rows: Tensor, kept_indices: Tensor, kept_positions: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that stay in the rows `[B]` bool; in other rows the present tokens, slot by slot. Both `[B, S, n]`."""
    held, count = positions.shape[-1], kept_indices.shape[-1]
    there = torch.arange(count, device=kept_indices.device).clamp_max(held - 1)
    were = torch.nn.functional.pad(positions, (0, max(count - held, 0)), value=-1)[..., :count]
    chosen = rows[:, None, None]
    return torch.where(chosen, kept_indices, there), torch.where(chosen, kept_positions, were)

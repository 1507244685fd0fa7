"""Scores of the tokens that a layer holds or takes in: calls of the policy."""

import torch
from torch import Tensor

from ..store.exact import Newest
from ..store.store import Store
from ..tensors.parts import map_tensors
from .layer_state import LayerState


def ask(state: LayerState, keys: Tensor, values: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
    """Score tokens of several layers at once, see `Scorer`; for policies whose scores do not depend on the layer."""
    return state.scorer(keys, values, positions, seen, budget=state.budget.for_policy)


def in_slots(state: LayerState, slots: Tensor | None, rows: Tensor | None = None) -> Tensor:
    """Score the tokens in the slots `[B, S, n]`, or all held tokens: `[B, S, n]`. `rows` `[m]` int64: of these alone,
    `[m, S, n]`; None = of all."""
    table, store, recorder, scores = state.known, state.store, state.recorder, None
    if state.action.scores and table.full:
        scores = state.action.scores()
    elif state.early:
        if (store_to_encode := uncoded(state)) is not None:
            _score_newest(state, store_to_encode.exact.newest_tokens())
        scores = table.scores
    if scores is not None:
        scores = scores if slots is None else scores.gather(-1, slots)
        return scores if rows is None else scores[rows]
    held = positions = table.positions
    if slots is None:
        keys, values = store.read(table.held, state.needs.reads, rows)
    else:
        positions, (keys, values) = held.gather(-1, slots), store.at(slots)
    observer = None if recorder is None else recorder.observer
    statistics = {} if observer is None else observer.statistics(held, slots)
    observed = None if observer is None else observer.count
    about = positions, table.seen - table.pads, statistics, observed, state.budget.for_policy
    if rows is not None:
        about = map_tensors(lambda part: part[rows], about)
    return state.scorer(keys, values, *about)


def of_overflow(state: LayerState, keys: Tensor, values: Tensor, positions: Tensor, count: int) -> Tensor:
    """Score the held tokens and `count` new ones behind them: `[B, S, held + count]`.

    Args:
        keys, values: `[B, H, held + count, dim]`.
        positions: `[B, S, held + count]`.
    """
    table, recorder = state.known, state.recorder
    seen = positions[:, 0].amax(-1) + 1
    if recorder is not None:
        statistics = recorder.observe_overflow(positions, table.counters.held)
        if not state.early:
            observed, room = recorder.observer.count, state.budget.for_policy
            return state.scorer(keys, values, positions, seen, statistics, observed, room)
    if not state.needs.token_local or table.counters.held == 0:
        return ask(state, keys, values, positions, seen)
    refresh(state)
    new = ask(state, keys[:, :, -count:], values[:, :, -count:], positions[..., -count:], seen)
    return torch.cat([table.scores, new], dim=-1)


def refresh(state: LayerState) -> None:
    """Score the tokens that came since the last eviction: the current block, or all tokens if necessary."""
    table = state.known
    table.write_back()
    table.take_scores(in_slots(state, table.unscored))


# ---- tokens that will be rounded ------------------------------------------------------------------------------------


def note_appended(state: LayerState, keys: Tensor, values: Tensor) -> None:
    """Score several tokens that were appended and encoded at once; keys and values `[B, H, n, dim]` before encoding."""
    if state.early:
        table, count = state.known, keys.shape[2]
        scores = ask(state, keys, values, table.positions[..., -count:], table.seen - table.pads)
        table.tokens.scores[:, :, table.held - count : table.held] = scores


def uncoded(state: LayerState) -> Store | None:
    """The store, if it has single tokens that are not encoded yet."""
    return state.store if state.store.uncoded or state.store.young else None


def block_waits(state: LayerState) -> bool:
    """Whether so many single tokens are not encoded that the next one needs the place of one of them."""
    return state.store.uncoded >= state.store.due


def encode(*layers: LayerState) -> None:
    """Score and encode the single tokens of these layers that are not encoded yet, of layers that are alike at once."""
    kinds: dict[tuple[object, ...], list[LayerState]] = {}
    for layer in layers:
        if layer.store.uncoded or layer.store.young:
            kinds.setdefault(layer.store.coded_kind, []).append(layer)
    for alike in kinds.values():
        newest = alike[0].store.encode([layer.store for layer in alike[1:]])
        for layer, new in zip(alike, newest, strict=False) if alike[0].early else ():
            _score_newest(layer, new)


def _score_newest(state: LayerState, newest: Newest) -> None:
    """Score those of the newest tokens that wait for their codes, if that is due then."""
    if not state.early:
        return
    table = state.known
    scores = table.tokens.scores
    sets = scores.shape[1]
    slots, new = newest.slots[:, :sets], newest.waits[:, :sets]
    positions = table.positions.gather(-1, slots)
    new_scores = ask(state, newest.keys, newest.values, positions, table.seen - table.pads)
    scores.scatter_(-1, slots, torch.where(new, new_scores, scores.gather(-1, slots)))

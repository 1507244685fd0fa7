"""Take tokens of a layer back, as if they had never come, or out, because a later mask hides them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..masks.padding import Hidden
from ..table.moves import empty_out
from ..table.rollback import order_without
from ..table.table import BlockTable
from ..tensors.autocast import without_autocast
from .layer_state import LayerState
from .overflow import with_lowest
from .scores import encode

# ---- taking back ----------------------------------------------------------------------------------------------------


def check_crop(state: LayerState, count: int) -> None:
    """Check that the last `count` columns can be taken back.

    Raises:
        ValueError: some of these tokens have been evicted. RuntimeError: see `ExposedStates`.
    """
    state.exposed.check()
    table, count = state.table, count - state.waiting  # pending tokens can always be dropped
    if table is not None and 0 < count < table.seen:
        state.action.check_undo(count, state.action.acts and _has_evicted(table))
        order_without(table, count, _tokens_among(state, count), _pads_without(state, count))


def _has_evicted(table: BlockTable) -> bool:
    return bool((table.evicted_tokens > 0).any())


def crop_pending(state: LayerState, count: int) -> int:
    """Take back pending tokens, the newest of `count`. Returns the number of tokens to take back that are held, for
    `crop_held`; the pending ones must be committed before."""
    state.seen -= count
    if state.pending is None:
        return count
    dropped = min(count, state.waiting)
    state.pending = state.pending.first(state.waiting - dropped)
    return count - dropped


@without_autocast
def crop_held(state: LayerState, count: int) -> None:
    """Take back the newest `count` held tokens; none are pending. The layer begins anew if it has seen no others.

    Raises:
        ValueError: see `check_crop`.
    """
    if state.table is not None and not state.seen:
        state.clear()
        return
    if not count:
        return
    pads = _pads_without(state, count)
    order = order_without(state.known, count, _tokens_among(state, count), pads)
    encode(state)
    state.move(order, count, pads)


def sort_pads(state: LayerState) -> bool:
    """Move pads in the middle of the text to the lowest slots, if the next token takes the last free slot.

    Returns:
        Whether anything was moved.
    """
    table = state.known
    if table.held + 1 != table.capacity:
        return False
    encode(state)
    state.move(table.positions.argsort(stable=True, dim=-1), 0, table.pads)
    return True


def _pads_without(state: LayerState, count: int) -> Tensor:
    """`[B]` columns that count for no position, among all but the last `count`."""
    table = state.known
    later = state.padding.counted(table.seen - count, table.seen, table.rows, table.device)
    return table.pads if later is None else table.pads - (~later).sum(-1)


def _tokens_among(state: LayerState, count: int) -> Tensor:
    """`[B]` real tokens among the last `count` columns that are not hidden."""
    table = state.known
    later = state.padding.columns(table.seen - count, table.seen, table.rows, table.device)
    return torch.full_like(table.pads, count) if later is None else later.sum(-1)


# ---- taking out -----------------------------------------------------------------------------------------------------


@without_autocast
def remove_hidden(layers: Sequence[LayerState], hidden: Hidden, uniform: bool) -> None:
    """Remove hidden tokens from all layers, whatever their scores. Their slots are the first to be used again.

    If one mask serves all layers, rows and heads (`uniform`), each layer has to empty the same number of slots per row:
    a layer that has evicted some of the hidden tokens evicts its tokens with the lowest scores instead, a few tokens
    earlier than otherwise.

    Raises:
        ValueError: the disposal cannot undo its work on evicted tokens. Nothing has changed then.
    """
    for layer in layers:
        if layer.held:
            layer.action.check_undo(0, layer.action.acts and _has_evicted(layer.known))
    gone = [_slots_of(layer, hidden.positions) for layer in layers]
    level = _level(gone) if uniform and gone else None
    for layer, slots in zip(layers, gone, strict=True):
        _take_out(layer, slots, level, hidden.pads)


def _level(gone: Sequence[Tensor]) -> Tensor:
    """`[B]` largest number of tokens that a set of any layer loses."""
    most = [slots.sum(-1).amax(-1) for slots in gone]
    return torch.stack([losses.to(most[0].device) for losses in most]).amax(0)


def _slots_of(state: LayerState, hidden: Tensor) -> Tensor:
    """`[B, S, held]` bool: the slots of the tokens whose positions are True in `hidden` `[B, seen]`."""
    positions = state.known.positions
    is_hidden = hidden.to(positions.device).gather(1, positions.clamp_min(0).flatten(1)).view_as(positions)
    return is_hidden & (positions >= 0)


def _take_out(state: LayerState, gone: Tensor, level: Tensor | None, pads: Tensor) -> None:
    """Remove tokens.

    Args:
        gone: see `_slots_of`.
        level: `[B]` number of slots to empty in each set, at least the number of `gone` slots in any set. The tokens
            with the lowest scores fill the difference. None = empty only the `gone` slots.
        pads: `[B]` number of columns without a position from now on.
    """
    encode(state)
    if level is not None:
        missing = level.to(gone.device)[:, None] - gone.sum(-1)
        if bool((missing > 0).any()):
            gone = with_lowest(state, gone, missing)
    empty_out(state.known, gone)
    state.take_out(gone, pads.to(gone.device))

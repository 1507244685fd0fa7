"""Tokens change their slots, or leave in the middle of the text: blocks are cut anew."""

from dataclasses import replace

import torch
from torch import Tensor

from ..ranking import KEEP
from .table import BlockTable


def resize(table: BlockTable, capacity: int) -> None:
    """Change the number of slots; it must exceed the number in use. Tokens keep their slots."""
    table.write_back()
    old = table.tokens
    table.make_room(capacity)
    for column, before in zip(table.tokens.first(table.held), old.first(table.held), strict=True):
        column.copy_(before)
    _grow_again(table, table.pads)


def take_back(table: BlockTable, order: Tensor | None, count: int, pads: Tensor) -> None:
    """Take back the last `count` columns.

    Args:
        order: `[B, S, held]`, slot that each remaining token moved from (removed ones last); None = none moved.
        pads: `[B]` number of pads among the remaining columns.
    """
    table.write_back()
    counters = table.counters
    if order is not None:
        table.tokens.reorder(order)
    if table.tokens.shifts is not None:
        table.tokens.shifts[:, :, counters.held - count :] = 0
    counters.held -= count
    counters.seen -= count
    counters.positions_until = counters.seen
    _grow_again(table, pads)


def _grow_again(table: BlockTable, pads: Tensor) -> None:
    """There are free slots; `pads` `[B]` among the columns that remain."""
    counters = table.counters
    full_at = table.full_at_of(table.tokens.positions[:, :, : counters.held])
    table.enter(replace(table.phase, full_at=full_at, pads=pads, order=None))
    counters.scored = counters.overwriting = False
    counters.chosen_at = -1


def replace_rows(
    table: BlockTable, rows: Tensor, positions: Tensor, scores: Tensor | None, limits: Tensor, shifts: Tensor | None
) -> None:
    """Like `BlockTable.replace`, for the rows `[B]` bool only, without new tokens. The other rows do not change.

    Args:
        positions, scores, limits, shifts: values for all rows; those of other rows must be the present ones.
    """
    table.write_back()
    counters, before = table.counters, table.phase
    sets, slots = rows[:, None], positions.shape[-1]
    table.make_room(slots)
    table.write_all(positions, scores, shifts)
    counters.held = slots
    table.phase = replace(before, limits=limits)
    full_at = torch.where(sets, table.full_at_of(positions), before.full_at)
    table.enter(replace(table.phase, full_at=full_at))
    order = torch.arange(slots, device=table.device).expand_as(positions)
    if before.order is not None:
        order = torch.cat([before.order[..., :slots], order[..., before.order.shape[-1] :]], dim=-1)
    newest = _begin_anew(table, sets, (full_at - counters.seen).clamp_min(0), order)
    missing = max(min(table.blocks_ahead, slots // table.block_size) - table.choice.ahead.shape[-1], 0)
    table.choice = replace(table.choice, ahead=torch.nn.functional.pad(table.choice.ahead, (0, missing)))
    table.begin(torch.where(sets, newest, table.choice.block))


def _begin_anew(table: BlockTable, sets: Tensor, left: Tensor, order: Tensor) -> Tensor:
    """These sets, `[B, 1 or S]` bool, have `left` `[B, S]` empty slots and no victims chosen ahead; `order` is that of
    the others. Returns the newest block, `[B, S]`."""
    sizes, phase = (table.capacity, table.block_size), table.phase
    mine = phase.logical_order(*sizes, left)
    table.phase = replace(phase, order=torch.where(sets[..., None], mine, order))
    choice = table.choice
    table.choice = replace(choice, left=choice.left.masked_fill(sets, 0), taken=choice.taken.masked_fill(sets, 0))
    return phase.block_at(*sizes, left + 1)


# ---- tokens that a later mask hides ---------------------------------------------------------------------------------


def empty_out(table: BlockTable, gone: Tensor) -> None:
    """Remove the tokens in these slots, `[B, S, held]` bool; `put_in_order` must follow."""
    table.write_back()
    table.tokens.positions[:, :, : table.held].masked_fill_(gone, -1)
    if table.tokens.shifts is not None:
        table.tokens.shifts[:, :, : table.held].masked_fill_(gone, 0)
    table.counters.scored = False


def order_of_text(table: BlockTable, sets: Tensor) -> Tensor:
    """`[B, S, held]` slots of the sets `[B, S]` bool in the order that `replace` needs; slots of other sets in their
    present order."""
    positions, slots = table.tokens.positions[:, :, : table.held], torch.arange(table.held, device=table.device)
    if table.limits is not None:
        positions = positions.masked_fill(slots >= table.limits[..., None], KEEP)
    return torch.where(sets[..., None], positions.argsort(stable=True, dim=-1), slots)


def put_in_order(table: BlockTable, order: Tensor, sets: Tensor, pads: Tensor) -> None:
    """Store that slots have moved by `order_of_text`. These sets fill their empty slots and then choose a victim; the
    other sets do not change.

    Args:
        pads: `[B]` number of columns without a position from now on.
    """
    counters, before = table.counters, table.phase
    table.tokens.reorder(order)
    counters.in_arrival_order = False
    full_at = table.full_at_of(table.tokens.positions[:, :, : counters.held])
    table.enter(replace(before, full_at=torch.where(sets, full_at, before.full_at), pads=pads))
    if not counters.overwriting:
        return
    left = (full_at - counters.seen).clamp_min(0)
    places = torch.arange(table.capacity, device=table.device) if before.order is None else before.order
    newest = _begin_anew(table, sets, left, places)
    used_up = sets & (left % table.block_size == 0)
    block_of_pads = table.phase.block_at(table.capacity, table.block_size, table.phase.full_at - counters.seen)
    table.begin(torch.where(sets, torch.where(used_up, block_of_pads, newest), table.choice.block))

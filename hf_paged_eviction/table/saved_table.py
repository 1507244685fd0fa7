"""A table in a file."""

import torch

from ..tensors.saved import LONGEST, SavedState, StateDict
from .shifts import held_shifts
from .state import Choice, Counters, Phase, Tokens
from .table import BlockTable


def state_of(table: BlockTable) -> StateDict:
    """All tensors and counters as they are now. What is protected, and when blocks are full, follows from them and the
    settings."""
    shifts = held_shifts(table) if table.full else table.tokens.shifts
    state = {**vars(table.phase), **vars(table.choice), **vars(table.counters), "scores": table.tokens.scores}
    for derived in ("bounds", "block_size", "residues", "positions_until", "held", "seen"):
        del state[derived]
    return {**state, "positions": table.all_positions(), "shifts": shifts}


def load(table: BlockTable, saved: SavedState, held: int, seen: int, unequal: bool) -> None:
    """Restore the state of another table of this size.

    Args:
        unequal: whether rows or sets may hold different numbers of tokens.

    Raises:
        ValueError: the state does not fit, or an index is out of range.
    """
    table.counters = _counters(table, saved, held, seen)
    positions, scores, shifts = vars(table.tokens).values()
    table.tokens = Tokens(
        saved.like("positions", positions, -1, LONGEST),
        saved.like("scores", scores),
        None if shifts is None else saved.like("shifts", shifts, 0, LONGEST),
    )
    table.phase = _phase(table, saved, unequal)
    table.choice = _choice(table, saved)
    saved.need(held <= seen or table.limits is not None, f"{held} tokens are held, and {seen} were seen")
    inside = table.positions.sort(-1).values
    saved.need((inside < table.next_positions[:, None, None]).all(), "positions lie in the future")
    again = (inside[..., 1:] == inside[..., :-1]) & (inside[..., 1:] >= 0)
    saved.need(not again.any(), "a position is held twice")


def _counters(table: BlockTable, saved: SavedState, held: int, seen: int) -> Counters:
    counters = Counters(
        table.block_size,
        held=held,
        seen=seen,
        in_arrival_order=saved.flag("in_arrival_order"),
        overwriting=saved.flag("overwriting"),
        positions_until=seen,
        scored=saved.flag("scored"),
        chosen_at=saved.number("chosen_at", -1, seen),
    )
    saved.need(counters.overwriting == (held == table.capacity), "it is full and goes on growing, or the reverse")
    counters.know(saved.numbers("full_at_values", 0, LONGEST))
    return counters


def _phase(table: BlockTable, saved: SavedState, unequal: bool) -> Phase:
    new, limits, order = table.phase, None, None
    if unequal and saved.has("limits"):
        limits = saved.like("limits", new.full_at, table.block_size, table.capacity)
    if saved.has("order"):
        order = saved.like("order", table.tokens.positions, 0, table.capacity - 1)
        in_order = order.sort(-1).values == torch.arange(table.capacity, device=table.device)
        saved.need(in_order.all(), "order is no order of the slots")
    pads = saved.like("pads", new.pads, 0, table.seen)
    full_at = saved.like("full_at", new.full_at, 0, LONGEST)
    # It has more values where rows were dropped.
    counted = set(full_at.flatten().tolist()) <= table.counters.full_at_values
    saved.need(counted, "full_at has values that are not counted")
    return Phase(pads, full_at, new.bounds, limits, order)


def _choice(table: BlockTable, saved: SavedState) -> Choice:
    new, blocks, ahead = table.choice, table.capacity // table.block_size, saved.peek("ahead", 3).shape[-1]
    fits = ahead in (table.blocks_ahead, min(table.blocks_ahead, blocks))
    saved.need(fits, f"{ahead} victims are chosen together, and its policy chooses {table.blocks_ahead}")
    return Choice(
        block=saved.like("block", new.block, 0, blocks - 1),
        slots=saved.like("slots", new.slots, 0, table.capacity - 1),
        ahead=saved.tensor("ahead", (*new.block.shape, ahead), torch.int64, 0, blocks - 1),
        left=saved.like("left", new.left, 0, ahead),
        taken=saved.like("taken", new.taken, 0, ahead - 1),
        evicted_blocks=saved.like("evicted_blocks", new.evicted_blocks, 0, LONGEST),
    )

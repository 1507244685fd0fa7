"""A table in a file."""

from dataclasses import replace

from ..tensors.saved import StateDict, in_range, restored
from .shifts import held_shifts
from .table import BlockTable


def state_of(table: BlockTable) -> StateDict:
    """All tensors and counters as they are now. What is protected follows from the settings; which row is in which
    phase is not kept, as after a permutation."""
    counters = vars(replace(table.counters, positions_until=table.seen))
    shifts = held_shifts(table) if table.full else table.tokens.shifts
    return {
        "tokens": replace(table.tokens, positions=table.all_positions(), shifts=shifts),
        "phase": {name: part for name, part in vars(table.phase).items() if name != "bounds"},
        "choice": table.choice,
        "counters": {name: part for name, part in counters.items() if name != "by_row"},
    }


def load(table: BlockTable, saved: StateDict) -> None:
    """Restore the state of another table of this size.

    Raises:
        ValueError: the state does not fit, or an index is out of range.
    """
    # A table may choose more victims together than it has blocks.
    table.choice = replace(table.choice, ahead=saved["choice"]["ahead"])
    for name in ("tokens", "phase", "choice", "counters"):
        setattr(table, name, restored(getattr(table, name), saved[name], name))
    in_range("held", table.counters.held, 0, table.capacity)  # after crop there may be none
    blocks, ahead = table.capacity // table.block_size, table.choice.ahead.shape[-1]
    most = {
        "pads": table.seen,
        "full_at": 2**40,  # no text is longer, and sums of such numbers are far from overflowing
        "limits": table.capacity,
        "order": table.capacity - 1,
        "block": blocks - 1,
        "slots": table.capacity - 1,
        "ahead": blocks - 1,
        "left": ahead,
        "taken": ahead - 1,
    }
    for name, part in {**vars(table.phase), **vars(table.choice)}.items():
        if name in most and part is not None:
            in_range(name, part, 0, most[name])
    table.counters.know([table.counters.full_at_values] * table.rows)

"""The shifts of a table, see `gaps`."""

import torch
from torch import Tensor

from .gaps import shifts_without_gaps
from .table import BlockTable


def held_shifts(table: BlockTable) -> Tensor | None:
    """The present shifts, `[B, S, held]` in slot order."""
    shifts, count = table.tokens.shifts, table.counters.seen - table.counters.positions_until
    if shifts is not None and count and table.full:
        shifts = table.without_newest(shifts, count, None)
    return None if shifts is None else shifts[:, :, : table.held]


def moved_shifts(
    table: BlockTable, kept_indices: Tensor, staying: Tensor, positions: Tensor, count: int
) -> Tensor | None:
    """The shifts of the tokens that stay, of the held ones and `count` new ones; -1 in sets that lose a token, whose
    gaps must be closed.

    Args:
        kept_indices: `[B, S, n]`, indices of the tokens that stay.
        staying: `[B, S, n]`, their positions, -1 for places without a real token.
        positions: `[B, 1 or S, held + count]`, positions of all tokens.
    """
    before = held_shifts(table)
    if before is None:
        return None
    moved = torch.nn.functional.pad(before, (0, count)).gather(-1, kept_indices).masked_fill(staying < 0, 0)
    went = (positions >= 0).sum(-1) > (staying >= 0).sum(-1)
    return moved.masked_fill(went[..., None], -1)


def close_gaps(table: BlockTable, shifts: Tensor, beginning: Tensor) -> None:
    """Close the gaps of the sets `[B, S]` that are about to overwrite the first slot of a block."""
    held = table.tokens.positions.scatter(-1, table.choice.slots[..., :1], -1)
    closed = shifts_without_gaps(held, table.next_positions)
    shifts.copy_(torch.where(beginning[..., None], closed, shifts))

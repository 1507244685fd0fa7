"""Read the state of recall from a file."""

import torch
from torch import Tensor

from ...table import victims
from ...table.table import BlockTable
from ...tensors.saved import LONGEST, SavedState


def load_stored(saved: SavedState, table: BlockTable, blocks: int) -> Tensor:
    """Read the number of blocks of each row in host memory, `[B]` int64; `blocks` is that of the longest row.

    Raises:
        ValueError: the number does not fit this table.
    """
    size, positions = table.block_size, victims.blocks(table)
    stored = saved.like("stored", table.pads, 0, LONGEST)
    saved.need(blocks == int(stored.max()), "its blocks are not counted")
    count = table.seen - table.pads
    away = count > table.capacity
    saved.need((stored <= count // size).all(), "more blocks are in host memory than came")
    saved.need(((stored >= (count - 1) // size) | ~away).all(), "blocks are missing in host memory")
    ids = positions[..., -1].div(size, rounding_mode="floor")
    newest = torch.arange(ids.shape[-1], device=ids.device) == table.choice.block[..., None]
    in_memory = (ids < stored[:, None, None]) | newest | ~away[:, None, None]
    saved.need(in_memory.all(), "blocks are in the slots that are not in host memory")
    return stored


def load_wanted(saved: SavedState, table: BlockTable) -> Tensor:
    """Read when queries last needed the blocks in the slots.

    Raises:
        ValueError: the tensor does not fit this table.
    """
    shape = (*table.phase.full_at.shape, table.capacity // table.block_size)
    return saved.tensor("wanted_at", shape, torch.int64, 0, LONGEST)

"""The blocks in the slots of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...table.budget import BlockBudget
from ...table.table import BlockTable
from .blocks import last_places, protected_blocks


@dataclass(frozen=True)
class Frames:
    """The slots of a full layer as frames, each with room for one block of consecutive tokens.

    Attributes:
        ids: `[B, S, F]` int64, the block of the text in each frame; -1 for the newest frame, and in rows that hold all
            their tokens.
        newest: `[B, S, F]` bool, the frame that new tokens overwrite.
        leaving: `[B, S]` int64, the block whose last tokens are still in the newest frame; -1 = none.
        filled: `[B]` int64, real tokens in the block that is being filled, 0 if it is full.
        count: `[B]` int64, real tokens seen.
        away: `[B]` bool, whether some of the row's tokens are not in the slots.
    """

    ids: Tensor
    newest: Tensor
    leaving: Tensor
    filled: Tensor
    count: Tensor
    away: Tensor

    @classmethod
    def of(cls, table: BlockTable) -> "Frames":
        """The present frames of a table."""
        size = table.block_size
        count = table.seen - table.pads
        filled = count % size
        # The last place of a frame is overwritten last, so what the table has written down of it holds, except in the
        # newest frame when it is full: then nothing else is in it.
        ids = last_places(table).div(size, rounding_mode="floor")
        newest = torch.arange(ids.shape[-1], device=ids.device) == table.choice.block[..., None]
        away = count > table.capacity
        ids = ids.masked_fill(~away[:, None, None], -1)
        leaving = ids.masked_fill(~newest, -1).amax(-1).masked_fill((filled == 0)[:, None], -1)
        return cls(ids.masked_fill(newest, -1), newest, leaving, filled, count, away)

    def present(self, blocks: int) -> Tensor:
        """`[B, S, blocks]` bool: which of the first blocks of the text are in frames."""
        there = torch.zeros(*self.ids.shape[:2], blocks, dtype=torch.bool, device=self.ids.device)
        there = there.scatter(-1, self.ids.clamp_min(0), self.ids >= 0)
        there[..., 0] |= (self.ids == 0).any(-1)
        return there

    def pinned(self, sizes: BlockBudget, table: BlockTable) -> Tensor:
        """`[B, S, F]` bool: frames that must not be overwritten, because of protected or newest tokens."""
        recent = self.count[:, None, None] // sizes.block_size - sizes.recent_blocks
        return (self.ids < 0) | protected_blocks(table, self.ids.clamp_min(0)) | (self.ids >= recent)


def order(ranks: Tensor, ids: Tensor) -> Tensor:
    """Sort the frames `[B, S, F]` by rank, then by block."""
    by_block = ids.argsort(dim=-1, stable=True)
    going = by_block.gather(-1, ranks.gather(-1, by_block).argsort(dim=-1, stable=True))
    return going.argsort(dim=-1)

"""Blocks that come back, and the frames they come to."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...table.table import BlockTable
from .frames import Frames


@dataclass(frozen=True)
class Swap:
    """Blocks of host memory take the place of others in the slots.

    While the newest frame fills, the last tokens of the block that stood there before are still in it. When that block
    comes back, all of its tokens are written to another frame, so those last tokens would be in two places. Therefore
    the last tokens of the block that leaves that other frame are written over them.

    Attributes:
        ids: `[B, S, K]` int64, blocks; the first `n` of each set come.
        frames: `[B, S, K]` int64, where they come to.
        come: `[B, S, K]` bool.
        count: how many come, in all rows and sets.
        again: whether any of them still has its last tokens in the newest frame.
    """

    ids: Tensor
    frames: Tensor
    come: Tensor
    count: int
    again: bool

    def carry_out(
        self, table: BlockTable, held: Frames, storages: Iterable[tuple[Tensor, Tensor]], fetched: tuple[Tensor, Tensor]
    ) -> None:
        """Write to all these keys and values `[B, H, slots, D]`, and to the table. Reads no tensor on the host.

        Args:
            held: what lies in the frames.
            fetched: keys and values `[count, h, P, D]`, set by set.
        """
        storages, positions = list(storages), table.tokens.positions
        if self.again:
            self._leave_behind(table, held, [positions[..., None], *(each for storage in storages for each in storage)])
        shape, size = self.ids.shape, table.block_size
        # Those that come, set by set. Their number is known, so that nothing has to be counted here.
        which = self.come.flatten().byte().argsort(descending=True, stable=True)[: self.count]
        row = which // (shape[1] * shape[2])
        set_ = which // shape[2] % shape[1]
        slots = table.slots_of(self.frames).flatten(0, 2)[which]  # [m, P]
        places = torch.arange(size, device=which.device)
        positions[row[:, None], set_[:, None], slots] = self.ids.flatten()[which][:, None] * size + places
        heads = torch.arange(fetched[0].shape[1], device=which.device)[None] if shape[1] == 1 else set_[:, None]
        for storage in storages:
            for states, blocks in zip(storage, fetched, strict=True):
                states[row[:, None, None], heads[..., None], slots[:, None]] = blocks

    def _leave_behind(self, table: BlockTable, held: Frames, storages: list[Tensor]) -> None:
        """What makes room for the block of which a part is still there takes the place of that part."""
        again = self.come & (self.ids == held.leaving[..., None])
        frame = self.frames.gather(-1, again.byte().argmax(-1, keepdim=True))
        source, target = table.slots_of(frame)[:, :, 0], table.choice.slots  # [B, S, P]
        places = torch.arange(table.block_size, device=source.device)
        moves = again.any(-1)[..., None] & (places >= held.filled[:, None, None])
        for states in storages:
            index = (each.expand(-1, states.shape[1], -1)[..., None] for each in (source, target))
            old, new = (each.expand(-1, -1, -1, states.shape[-1]) for each in index)
            moved = torch.where(moves[..., None], states.gather(2, old), states.gather(2, new))
            states.scatter_(2, new, moved)

"""Blocks that come back, and the frames that they take."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...store.columns import slot_index
from ...store.store import Store
from ...table.table import BlockTable
from .blocks import slots_of
from .frames import Frames


@dataclass(frozen=True)
class Swap:
    """Writes blocks from host memory over others in the slots.

    While the newest frame fills, it still holds the last tokens of the block that was there before. When that block
    comes back, all its tokens are written to another frame, so its last tokens would be in two places. Therefore they
    are overwritten by the last tokens of the block that leaves the other frame.

    Attributes:
        ids: `[B, S, K]` int64, blocks; the first ones of each set come back, see `come`.
        frames: `[B, S, K]` int64, the frames that they take.
        come: `[B, S, K]` bool.
        count: number of blocks that come back, in all rows and sets.
        again: whether any of them still has its last tokens in the newest frame.
    """

    ids: Tensor
    frames: Tensor
    come: Tensor
    count: int
    again: bool

    def carry_out(
        self,
        table: BlockTable,
        held: Frames,
        store: Store,
        fetched: Sequence[Tensor],
        copies: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Write to the store and to the table. Reads no tensor on the host.

        Args:
            held: the blocks in the frames.
            fetched: keys and values of the blocks, `[count, h, P, D]`, set by set.
            copies: copies of keys and values `[B, H, slots or more, D]` that have to change in the same way.
        """
        positions = table.tokens.positions
        if self.again:
            self._leave_behind(table, held, [positions[..., None], *store.tensors, *(copies or ())])
        shape, size = self.ids.shape, table.block_size
        # Those that come, set by set. Their number is known, so that nothing has to be counted here.
        which = self.come.flatten().byte().argsort(descending=True, stable=True)[: self.count]
        row = which // (shape[1] * shape[2])
        set_ = which // shape[2] % shape[1]
        slots = slots_of(table, self.frames).flatten(0, 2)[which]  # [m, P]
        places = torch.arange(size, device=which.device) + self.ids.flatten()[which][:, None] * size
        positions[row[:, None], set_[:, None], slots] = places
        heads = torch.arange(fetched[0].shape[1], device=which.device)[None] if shape[1] == 1 else set_[:, None]
        for states, new in zip(store.tensors, fetched, strict=True):
            states[row[:, None, None], heads[..., None], slots[:, None]] = new
        if copies is not None:
            self._copy(table, store, copies)

    def _copy(self, table: BlockTable, store: Store, copies: tuple[Tensor, Tensor]) -> None:
        """As the store reads them, to what was read before."""
        slots = slots_of(table, self.frames).flatten(2)  # [B, S, K * P]
        come = self.come.repeat_interleave(table.block_size, dim=-1)[..., None]
        for states, read in zip(copies, store.at(slots), strict=True):
            index = slot_index(slots, states)
            states.scatter_(2, index, torch.where(come, read, states.gather(2, index)))

    def _leave_behind(self, table: BlockTable, held: Frames, storages: list[Tensor]) -> None:
        """Write the last tokens of a leaving block over those of a block that comes back, see the class."""
        again = self.come & (self.ids == held.leaving[..., None])
        frame = self.frames.gather(-1, again.byte().argmax(-1, keepdim=True))
        source, target = slots_of(table, frame)[:, :, 0], table.choice.slots  # [B, S, P]
        places = torch.arange(table.block_size, device=source.device)
        moves = again.any(-1)[..., None] & (places >= held.filled[:, None, None])
        for states in storages:
            index = (slots.expand(-1, states.shape[1], -1)[..., None] for slots in (source, target))
            old, new = (slots.expand(-1, -1, -1, states.shape[-1]) for slots in index)
            moved = torch.where(moves[..., None], states.gather(2, old), states.gather(2, new))
            states.scatter_(2, new, moved)

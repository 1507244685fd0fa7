"""The blocks in the slots of a layer, and the blocks that take their places."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_paged_eviction.internals import BlockBudget, BlockTable, Store, slot_index


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
        size, positions = table.block_size, table.tokens.positions
        count = table.seen - table.pads
        filled = count % size
        # The last place of a frame is overwritten last, so what the table has written down of it holds, except in the
        # newest frame when it is full: then nothing else is in it.
        if table.phase.order is not None:
            positions = positions.gather(-1, table.phase.order)
        ids = positions[..., size - 1 :: size].div(size, rounding_mode="floor")
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


def align(table: BlockTable) -> None:
    """Let blocks begin at positions that are multiples of `P`; full rows continue inside their last block."""
    inside, full = table.next_positions % table.block_size, table.phase.full_at <= table.counters.seen
    table.enter(replace(table.phase, full_at=table.phase.full_at - inside[:, None] * full))


def protected_blocks(table: BlockTable, blocks: Tensor) -> Tensor:
    """Bool, which blocks of the text `[B, ...]`, at least 0, have protected tokens; block `n` is the tokens from
    `n * P` on."""
    bounds, size = table.phase.bounds, table.block_size
    flat = blocks.flatten(1).contiguous() * size
    before, within = (torch.searchsorted(bounds, flat + last, right=True) for last in (0, size - 1))
    return ((before % 2 == 1) | (before != within)).view(blocks.shape)


def _slots_of(table: BlockTable, frames: Tensor) -> Tensor:
    """Slots `[B, S, n, P]` of the frames `[B, S, n]`."""
    slots = frames[..., None] * table.block_size + torch.arange(table.block_size, device=table.device)
    return slots if table.phase.order is None else table.phase.order.gather(-1, slots.flatten(2)).view_as(slots)


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
        again: whether any of them still has its last tokens in the newest frame.
    """

    ids: Tensor
    frames: Tensor
    come: Tensor
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
            fetched: keys and values of the blocks, `[m, h, P, D]`, set by set.
            copies: copies of keys and values `[B, H, slots or more, D]` that have to change in the same way.
        """
        positions, all_slots = table.tokens.positions, _slots_of(table, self.frames)
        if self.again:
            self._leave_behind(table, held, [positions[..., None], *store.tensors, *(copies or ())])
        (sets, most), size = self.ids.shape[1:], table.block_size
        # Those that come, set by set. Their number is known, so that nothing has to be counted here.
        which = self.come.flatten().byte().argsort(descending=True, stable=True)[: len(fetched[0])]
        row, set_, slots = which // (sets * most), which // most % sets, all_slots.flatten(0, 2)[which]
        positions[row[:, None], set_[:, None], slots] = (
            torch.arange(size, device=which.device) + self.ids.flatten()[which][:, None] * size
        )
        heads = torch.arange(fetched[0].shape[1], device=which.device)[None] if sets == 1 else set_[:, None]
        for states, new in zip(store.tensors, fetched, strict=True):
            states[row[:, None, None], heads[..., None], slots[:, None]] = new
        if copies is not None:  # as the store reads them
            come = self.come.repeat_interleave(size, dim=-1)[..., None]
            for states, read in zip(copies, store.at(all_slots.flatten(2)), strict=True):
                index = slot_index(all_slots.flatten(2), states)
                states.scatter_(2, index, torch.where(come, read, states.gather(2, index)))

    def _leave_behind(self, table: BlockTable, held: Frames, storages: list[Tensor]) -> None:
        """Write the last tokens of a leaving block over those of a block that comes back, see the class."""
        again = self.come & (self.ids == held.leaving[..., None])
        frame = self.frames.gather(-1, again.byte().argmax(-1, keepdim=True))
        source, target = _slots_of(table, frame)[:, :, 0], table.choice.slots  # [B, S, P]
        places = torch.arange(table.block_size, device=source.device)
        moves = again.any(-1)[..., None] & (places >= held.filled[:, None, None])
        for states in storages:
            old, new = (slot_index(slots, states) for slots in (source, target))
            moved = torch.where(moves[..., None], states.gather(2, old), states.gather(2, new))
            states.scatter_(2, new, moved)

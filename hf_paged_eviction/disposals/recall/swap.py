"""Blocks that come back, and the frames they come to."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ...store.host import HostBlocks
from ...table.table import BlockTable
from .frames import Frames


class Swap:
    """Blocks of host memory take the place of others in the slots; `m` of them, of all rows and sets.

    The block whose last tokens stand in the newest frame cannot come back beside them, for then a token would be in two
    places: the block that makes room for it leaves its own last tokens there.

    Attributes:
        count: `m`.

    Args:
        ids, frames: `[B, S, K]` int64, block and frame.
        valid: `[B, S, K]` bool, which of them are meant.
        held: what lies in the frames.
        heads: KV heads.
    """

    def __init__(self, ids: Tensor, frames: Tensor, valid: Tensor, table: BlockTable, held: Frames, heads: int) -> None:
        self._table, self._size = table, table.block_size
        row, set_, at = valid.nonzero(as_tuple=True)
        self.count = len(row)
        self._row, self._set, self._block = row, set_, ids[row, set_, at]
        self._head = torch.arange(heads, device=row.device).expand(len(row), -1)
        if valid.shape[1] > 1:
            self._head = set_[:, None]
        self._slots = table.slots_of(frames)[row, set_, at]  # [m, P]
        self._places = torch.arange(self._size, device=row.device)
        # At most one of a set: the others must not write to its newest frame.
        self._again = (self._block == held.leaving[row, set_]).nonzero()[:, 0]
        self._newest = table.choice.slots[row, set_][self._again]
        self._stays = self._places >= held.filled[row, None][self._again]

    def carry_out(self, host: HostBlocks, storages: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Write to all these keys and values `[B, H, slots, D]`, and to the table."""
        storages, positions = list(storages), self._table.tokens.positions
        sets = (self._row[:, None], self._set[:, None])
        heads = (self._row[:, None, None], self._head[:, :, None])
        if len(self._again):
            self._leave_behind(positions, sets, self._slots, self._newest, self._stays)
            for states in (each for storage in storages for each in storage):
                stays = self._stays[:, None, :, None]
                self._leave_behind(states, heads, self._slots[:, None], self._newest[:, None], stays)
        positions[(*sets, self._slots)] = self._block[:, None] * self._size + self._places
        fetched = host.read(self._row[:, None], self._head, self._block[:, None])  # [m, h, P, D]
        for storage in storages:
            for states, blocks in zip(storage, fetched, strict=True):
                states[(*heads, self._slots[:, None])] = blocks

    def _leave_behind(
        self, states: Tensor, which: tuple[Tensor, Tensor], slots: Tensor, newest: Tensor, stays: Tensor
    ) -> None:
        row, head, slots = (index[self._again] for index in (*which, slots))
        states[row, head, newest] = torch.where(stays, states[row, head, slots], states[row, head, newest])

"""The base class of replacements, and what it is told of the blocks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Resident:
    """When the blocks that are held were needed: `B` rows, `S` sets, `F` frames.

    Attributes:
        wanted_at: `[B, S, F]` int64, the last moment at which a query needed the block in this frame.
        asked: `[B, S, F]` int64, how many queries needed the block since it came.
        unlikely: `[B, S, F]` bool, a prediction that the block will not be needed soon.
        phase: `[B, S]` int64, moment at which the present phase began, for marking replacements.
    """

    wanted_at: Tensor
    asked: Tensor
    unlikely: Tensor
    phase: Tensor

    @classmethod
    def empty(cls, ids: Tensor) -> "Resident":
        """The state before any query, for the blocks `ids` `[B, S, F]`."""
        none = torch.zeros_like(ids)
        return cls(none, none, none.bool(), none.sum(-1))

    def hit(self, where: Tensor, now: Tensor) -> "Resident":
        """Count a query that needed the blocks in the frames `where` `[B, S, F]` bool, at moment `now` `[B]`."""
        return replace(
            self, wanted_at=torch.where(where, now[:, None, None], self.wanted_at), asked=self.asked + where.long()
        )

    def came(self, frames: Tensor, which: Tensor, now: Tensor) -> "Resident":
        """New blocks came to `frames` `[B, S, K]` where `which` `[B, S, K]` is true."""
        at = torch.where(which, now[:, None, None], self.wanted_at.gather(-1, frames))
        counts = torch.where(which, 1, self.asked.gather(-1, frames))
        return replace(
            self, wanted_at=self.wanted_at.scatter(-1, frames, at), asked=self.asked.scatter(-1, frames, counts)
        )


class Replacement(ABC):
    """Chooses the blocks that make room. It holds parameters only; the state of a run is in `Resident`."""

    @abstractmethod
    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """Rank the frames, `[B, S, F]` int64: the lowest goes first; of equal ones the oldest block.

        Args:
            ids: `[B, S, F]` int64, block of the text in each frame.
            now: `[B]` int64, the moment, counted in tokens seen.
        """

    def after(self, resident: Resident, free: Tensor, faults: Tensor, now: Tensor) -> Resident:
        """Called after blocks were missing: begin a new phase, if necessary.

        Args:
            resident: as in the call of `ranks`.
            free: `[B, S, F]` bool, frames that may be overwritten.
            faults: `[B, S]` int64, number of missing blocks.
        """
        return resident


def order(ranks: Tensor, ids: Tensor) -> Tensor:
    """Sort the frames `[B, S, F]` by rank, then by block."""
    by_block = ids.argsort(dim=-1, stable=True)
    going = by_block.gather(-1, ranks.gather(-1, by_block).argsort(dim=-1, stable=True))
    return going.argsort(dim=-1)


def scramble(ids: Tensor, now: Tensor) -> Tensor:
    """Pseudo-random numbers from 0 to 2**20 - 1, a hash of block and moment: the same in every batch, on every
    device."""
    bits = (ids * 0x2C1B3C6D + now * 0x45D9F3B + 0x1234567) & 0xFFFFFFFF
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        bits = ((bits ^ (bits >> 16)) * factor) & 0xFFFFFFFF
    return (bits ^ (bits >> 16)) & 0xFFFFF

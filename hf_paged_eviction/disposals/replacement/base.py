"""What a replacement sees, and what it says."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...naming import Named


@dataclass(frozen=True)
class Resident:
    """The blocks in the slots of a layer: `B` rows, `S` sets, `F` frames. Rows first.

    Attributes:
        wanted_at: `[B, S, F]` int64, moment at which the block in this frame was last asked for.
        asked: `[B, S, F]` int64, how often since it came.
        unlikely: `[B, S, F]` bool, a prediction: it will not be asked for soon.
        phase: `[B, S]` int64, moment at which the present phase began; of those that mark.
    """

    wanted_at: Tensor
    asked: Tensor
    unlikely: Tensor
    phase: Tensor

    @classmethod
    def empty(cls, ids: Tensor) -> "Resident":
        """Nothing was asked for yet of the blocks `ids` `[B, S, F]`."""
        none = torch.zeros_like(ids)
        return cls(none, none, none.bool(), none.sum(-1))

    def hit(self, where: Tensor, now: Tensor) -> "Resident":
        """The blocks in these frames `[B, S, F]` were asked for; `now` `[B]`."""
        return replace(
            self, wanted_at=torch.where(where, now[:, None, None], self.wanted_at), asked=self.asked + where.long()
        )

    def began(self, where: Tensor, now: Tensor) -> "Resident":
        """New tokens are being written to these frames `[B, S, F]`."""
        return replace(
            self,
            wanted_at=torch.where(where, now[:, None, None], self.wanted_at),
            asked=torch.where(where, 1, self.asked),
        )

    def came(self, frames: Tensor, which: Tensor, now: Tensor) -> "Resident":
        """Others came to these frames `[B, S, K]`, where `which` `[B, S, K]` says so."""
        at = torch.where(which, now[:, None, None], self.wanted_at.gather(-1, frames))
        counts = torch.where(which, 1, self.asked.gather(-1, frames))
        return replace(
            self, wanted_at=self.wanted_at.scatter(-1, frames, at), asked=self.asked.scatter(-1, frames, counts)
        )


class Replacement(Named, ABC):
    """Says which blocks make room. Holds parameters only; what it knows of a run lies in `Resident`.

    Class attributes:
        name: set by `register_replacement`.
        paper: arXiv id, or None.
    """

    def of_layer(self) -> "Replacement":
        """What one layer asks: this, or something that remembers more than `Resident` and serves that layer alone."""
        return self

    @abstractmethod
    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """`[B, S, F]` int64: the lowest goes first; of equal ones the oldest block.

        Args:
            ids: `[B, S, F]` int64, block of the text in each frame.
            now: `[B]` int64, the moment: tokens seen.
        """

    def after(self, resident: Resident, free: Tensor, faults: Tensor, now: Tensor) -> Resident:
        """Blocks were asked for that were not there: begin a new phase, if need be.

        Args:
            resident: as it was when `ranks` was asked.
            free: `[B, S, F]` bool, frames that may be overwritten.
            faults: `[B, S]` int64, how many blocks come.
        """
        return resident


def order(ranks: Tensor, ids: Tensor) -> Tensor:
    """Places `[B, S, F]` in the order of going: by rank, then by block."""
    by_block = ids.argsort(dim=-1, stable=True)
    going = by_block.gather(-1, ranks.gather(-1, by_block).argsort(dim=-1, stable=True))
    return going.argsort(dim=-1)


def scramble(ids: Tensor, now: Tensor) -> Tensor:
    """Numbers from 0 to 2**20 - 1 drawn from block and moment: the same in every batch and on every device."""
    bits = (ids * 0x2C1B3C6D + now * 0x45D9F3B + 0x1234567) & 0xFFFFFFFF
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        bits = ((bits ^ (bits >> 16)) * factor) & 0xFFFFFFFF
    return (bits ^ (bits >> 16)) & 0xFFFFF

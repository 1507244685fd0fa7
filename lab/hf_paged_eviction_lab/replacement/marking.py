"""Marking with one-bit predictions (Paging with Succinct Predictions, arXiv 2210.02775)."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .base import Replacement, Resident, scramble


class _Marking(Replacement):
    """A block that was asked for in this phase is marked. A phase ends when room is needed and all are marked.

    The set S of the paper, what was there when the phase began, needs no list: who comes is marked, so the unmarked
    blocks are those of S that were neither asked for nor replaced since.
    """

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        marked = resident.wanted_at >= resident.phase[..., None]
        return (self._classes(marked, resident.unlikely) << 32) + scramble(ids, now[:, None, None])

    @abstractmethod
    def _classes(self, marked: Tensor, unlikely: Tensor) -> Tensor:
        """`[B, S, F]` int64, the lowest goes first."""

    def after(self, resident: Resident, free: Tensor, faults: Tensor, now: Tensor) -> Resident:
        """See `Replacement.after`."""
        marked = resident.wanted_at >= resident.phase[..., None]
        room = (free & self._goes_in_this_phase(marked, resident.unlikely)).sum(-1)
        return replace(resident, phase=torch.where(faults > room, now[:, None], resident.phase))

    def _goes_in_this_phase(self, marked: Tensor, unlikely: Tensor) -> Tensor:
        """`[B, S, F]` bool, blocks that make room without a new phase."""
        return ~marked


@dataclass(frozen=True)
class MarkPredict(_Marking):
    """Evicts a random unmarked block; one that is predicted not to be needed, if there is any."""

    def _classes(self, marked: Tensor, unlikely: Tensor) -> Tensor:
        return 2 * marked.long() + (~unlikely).long()


@dataclass(frozen=True)
class Mark0(_Marking):
    """Evicts a block that is predicted not to be needed, marked or not; otherwise a random unmarked block.

    A new phase begins only if there is neither. In the paper a block that is predicted not to be needed leaves at once;
    here it leaves when room is needed.
    """

    def _classes(self, marked: Tensor, unlikely: Tensor) -> Tensor:
        return torch.where(unlikely, 0, 1 + marked.long())

    def _goes_in_this_phase(self, marked: Tensor, unlikely: Tensor) -> Tensor:
        return unlikely | ~marked


@dataclass(frozen=True)
class Flush(Mark0):
    """The deterministic variant: if no block is predicted not to be needed, all are given up.

    Difference from the paper: a block that is given up leaves when room is needed, the one whose last use is longest
    ago first. If it is needed before that, it stays.
    """

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        given_up = resident.unlikely | (resident.wanted_at < resident.phase[..., None])
        return ((~given_up).long() << 32) + resident.wanted_at

"""Marking with one-bit predictions (Paging with Succinct Predictions, arXiv 2210.02775)."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .base import Replacement, Resident, scramble
from .registry import register_replacement


class _Marking(Replacement):
    """A block that was asked for in this phase is marked. A phase ends when room is needed and all are marked."""

    paper: ClassVar[str | None] = "2210.02775"

    def ranks(self, resident: Resident, ids: Tensor, now: Tensor) -> Tensor:
        """See `Replacement.ranks`."""
        marked = resident.wanted_at >= resident.phase[..., None]
        return (self._classes(marked, resident.unlikely) << 32) + scramble(ids, now[:, None, None])

    @abstractmethod
    def _classes(self, marked: Tensor, unlikely: Tensor) -> Tensor:
        """`[B, S, F]` int64, the lowest goes first."""

    def after(self, resident: Resident, free: Tensor, faults: Tensor, now: Tensor) -> Resident:
        """See `Replacement.after`."""
        unmarked = (free & (resident.wanted_at < resident.phase[..., None])).sum(-1)
        return replace(resident, phase=torch.where(faults > unmarked, now[:, None], resident.phase))


@register_replacement("mark_predict")
@dataclass(frozen=True)
class MarkPredict(_Marking):
    """Of the unmarked blocks a random one goes, one that is predicted not to be needed if there is any."""

    def _classes(self, marked: Tensor, unlikely: Tensor) -> Tensor:
        return 2 * marked.long() + (~unlikely).long()


@register_replacement("mark0")
@dataclass(frozen=True)
class Mark0(_Marking):
    """A block that is predicted not to be needed goes first, marked or not; else a random unmarked one.

    Difference: in the paper such a block leaves at once; here it leaves when room is needed.
    """

    def _classes(self, marked: Tensor, unlikely: Tensor) -> Tensor:
        return torch.where(unlikely, 0, 1 + marked.long())

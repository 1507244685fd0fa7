"""Prefetched blocks on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .host import Fetched, HostBlocks


@dataclass(frozen=True)
class Places:
    """Indices of blocks in host memory. All tensors are int64 in host memory.

    Attributes:
        row, set, block: `[m]`.
        heads: `[m, h]`, KV heads of the set.
    """

    row: Tensor
    set: Tensor
    block: Tensor
    heads: Tensor

    @classmethod
    def of(cls, ids: Tensor, heads: int) -> "Places":
        """The places of the blocks `ids` `[B, S, K]` that are not -1, set by set; `ids` is in host memory."""
        row, set_, at = (ids >= 0).nonzero(as_tuple=True)
        every = torch.arange(heads, device="cpu").expand(len(row), -1)
        return cls(row, set_, ids[row, set_, at], set_[:, None] if ids.shape[1] > 1 else every)

    def __len__(self) -> int:
        return len(self.row)

    def read(self, host: HostBlocks, which: Tensor | None = None) -> Tensor:
        """Read these blocks, or those at `which` `[n]`, to the layer's device."""
        row, heads, block = self.row, self.heads, self.block
        if which is not None:
            row, heads, block = row[which], heads[which], block[which]
        return host.read(row[:, None], heads, block[:, None])

    def find(self, others: "Places") -> Tensor:
        """The index `[m]` of each of these blocks among the others; -1 = not there."""
        if not len(others):
            return torch.full_like(self.row, -1)
        pairs = ((self.row, others.row), (self.set, others.set), (self.block, others.block))
        same = torch.stack([mine[:, None] == other for mine, other in pairs]).all(0)
        return torch.where(same.any(-1), same.byte().argmax(-1), -1)


class Stage:
    """Copies of blocks of host memory, on the layer's device. Blocks never change, so copies stay valid.

    Attributes:
        foreseen: number of blocks so far that were here when a query needed them.
    """

    def __init__(self) -> None:
        self.foreseen = 0
        self.empty()

    def empty(self) -> None:
        """Drop all copies, because rows have changed."""
        self._held: tuple[Places, Fetched] | None = None

    @property
    def bytes(self) -> int:
        """Bytes on the device."""
        return 0 if self._held is None else self._held[1].states.nbytes

    def take(self, host: HostBlocks, places: Places) -> Tensor:
        """Get blocks, `[m, h, P, width]` on the device: from here, or from host memory."""
        if self._held is None:
            return places.read(host)
        here = places.find(self._held[0])
        self.foreseen += int((here >= 0).sum())
        return self._gather(host, places, here)

    def fill(self, host: HostBlocks, places: Places) -> None:
        """Hold these blocks from now on. Missing ones are copied while the device does other work."""
        if not len(places):
            self.empty()
        elif self._held is None:
            self._held = places, host.ahead(lambda: places.read(host))
        else:
            here = places.find(self._held[0])
            self._held = places, host.ahead(lambda: self._gather(host, places, here))

    def _gather(self, host: HostBlocks, places: Places, here: Tensor) -> Tensor:
        """Get blocks from here where `here` `[m]` is not -1, else from host memory."""
        missing = (here < 0).nonzero()[:, 0]
        if self._held is None or len(missing) == len(here):
            return places.read(host)
        states = self._held[1].wait()
        blocks = states.index_select(0, here.clamp_min(0).to(states.device, non_blocking=True))
        if len(missing):
            blocks.index_copy_(0, missing.to(states.device, non_blocking=True), places.read(host, missing))
        return blocks

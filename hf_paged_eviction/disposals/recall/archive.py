"""The text of a layer in host memory, and summaries of its blocks on the device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...attention.parts import Part
from ...store.store import Store
from ..base import Held
from .host import HostBlocks
from .settings import Settings
from .summaries import Summaries

#: Number of blocks per round, if all are read from host memory.
ROUND = 64


class Archive:
    """Every full block of each row, and a summary of it.

    Attributes:
        host: the blocks.
        summaries: on the layer's device; empty if another layer chooses.
        stored: `[B]` int64 on the layer's device, number of blocks in host memory.

    Args:
        settings: parameters of `Recall`.
        size: tokens of a block.
        store: of the layer.
        chooses: whether this layer chooses blocks, so that it needs summaries.
    """

    def __init__(self, settings: Settings, size: int, store: Store, chooses: bool) -> None:
        like, _ = store.read(0)
        self.host = HostBlocks(store.tensors, size)
        self.summaries = Summaries(settings.summary, like)
        self.stored = torch.zeros(len(like), dtype=torch.int64, device=like.device)
        self._settings, self._chooses = settings, chooses

    def take_in(self, held: Held) -> None:
        """Copy the full blocks that are not in host memory yet, and summarise them.

        Raises:
            ValueError: the text is longer than `Recall.length`.
        """
        host, size, stored = self.host, self.host.block_size, self.stored
        now = (held.positions.amax((1, 2)) + 1) // size
        host.reserve(self._allowed(int(now.max())))
        first, end = (blocks[:, None, None] * size for blocks in (stored, now))
        missing = (held.positions >= first) & (held.positions < end)
        heads = held.keys.shape[1]
        row, head, at = missing.expand(-1, heads, -1).nonzero(as_tuple=True)
        position = held.positions.expand(-1, heads, -1)[row, head, at]
        host.write(row, head, position, [part[row, head, at] for part in (held.keys, held.values)])
        if self._chooses:
            self._sum_up(row, head, position, held.keys[row, head, at], now)
        self.stored = now

    def _allowed(self, blocks: int) -> int:
        most = self._settings.most_blocks(self.host.block_size)
        if most is not None and blocks > most:
            raise ValueError(
                f"recall(length={self._settings.length}): the text is longer. Start again with a larger length: "
                "this cache cannot be used any more."
            )
        return blocks

    def _sum_up(self, row: Tensor, head: Tensor, position: Tensor, keys: Tensor, now: Tensor) -> None:
        """Of the blocks from `stored` to `now` `[B]`, whose tokens these are: index tensors `[m]`, keys `[m, D]`."""
        size, stored = self.host.block_size, self.stored
        self.summaries.reserve(int(now.max()), self._settings.most_blocks(size))
        count = now - stored
        # The index of each row's new blocks among those of all rows.
        place = (count.cumsum(0) - count - stored)[row] + position // size
        blocks = keys.new_empty(int(count.sum()), self.host.states.shape[1], size, keys.shape[-1])
        blocks[place, head, position % size] = keys
        number = torch.arange(self.host.blocks, device=now.device)
        new = (number >= stored[:, None]) & (number < now[:, None])
        new_row, new_block = new.nonzero(as_tuple=True)
        self.summaries.put(new_row, new_block, blocks)

    def away(self, positions: Tensor) -> Iterator[Part]:
        """Yield all tokens that are not in the slots, a few blocks at a time.

        Args:
            positions: `[B, S, C]` positions of the tokens in the slots.
        """
        size, stored = self.host.block_size, int(self.stored.max())
        away = torch.arange(stored * size, device=positions.device) < self.stored[:, None, None] * size
        away = away.expand(-1, positions.shape[1], -1)
        inside = (positions >= 0) & (positions < stored * size)
        here = torch.zeros_like(away, dtype=torch.int64)
        here = here.scatter_add(-1, positions.clamp(0, max(stored * size - 1, 0)), inside.long())
        away = away & (here == 0)
        for first in range(0, stored, ROUND):
            last = min(first + ROUND, stored)
            seen = away[..., first * size : last * size]
            if bool(seen.any()):
                yield Part(*self.host.span(first, last), torch.where(seen, 0.0, float("-inf"))[:, :, None])

    def select(self, rows: Tensor) -> None:
        """Replace row `i` by row `rows[i]`."""
        self.host.select(rows)
        self.summaries.select(rows)
        self.stored = self.stored[rows]

    def fill(self, states: Tensor, high: Tensor, low: Tensor, stored: Tensor) -> None:
        """Replace all blocks by these; see `HostBlocks` and `Summaries`."""
        self.host.fill(states)
        self.summaries.fill(high.to(self.stored.device), low.to(self.stored.device))
        self.stored = stored.to(self.stored.device)

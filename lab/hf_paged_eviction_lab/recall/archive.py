"""The text of a layer in host memory, and what is known of its blocks on the device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_paged_eviction.internals import (
    Held,
    Part,
    StateDict,
    Store,
    in_range,
    map_tensors,
)

from .host import HostBlocks
from .summaries import Summaries

#: Number of blocks per round, if all are read from host memory.
ROUND = 64
#: The names of summaries in a file.
_VECTORS = "high", "low"


class Archive:
    """Every full block of each row, and a summary of it.

    Attributes:
        host: the blocks.
        summaries: on the layer's device.
        stored: `[B]` int64 on the layer's device, number of blocks in host memory.
        due: `[B]` int64, tokens seen from which on blocks are chosen anew.
        wanted_at: `[B, S, F]` int64, when a query last needed the block in each frame, counted in tokens seen; None =
            no query since the slots were last filled.

    Args:
        store: of the layer.
        size: tokens of a block.
        sets: `S`.
        vectors: see `Summaries`.
        length: number of tokens of the longest text; None = no limit.
    """

    def __init__(self, store: Store, size: int, sets: int, vectors: int, length: int | None) -> None:
        like, _ = store.read(0)
        self.host, self.summaries = HostBlocks(store.tensors, size, sets), Summaries(vectors, like)
        self.stored = torch.zeros(len(like), dtype=torch.int64, device=like.device)
        self.due = torch.zeros_like(self.stored)
        self.wanted_at: Tensor | None = None
        self._size, self._length = size, length

    def take_in(self, held: Held) -> None:
        """Copy the full blocks that are not in host memory yet, and summarise them.

        Raises:
            ValueError: the text is longer than `Recall.length`.
        """
        size, length = self._size, self._length
        now = (held.positions.amax((1, 2)) + 1) // size
        blocks, most = int(now.max()), None if length is None else -(-length // size)
        if most is not None and blocks > most:
            raise ValueError(
                f"recall(length={length}): the text is longer. Start again with a larger length: this cache cannot be "
                "used any more."
            )
        self.host.reserve(blocks)
        first, end = (count[:, None, None] * size for count in (self.stored, now))
        missing = (held.positions >= first) & (held.positions < end)
        heads = held.keys.shape[1]
        row, head, at = missing.expand(-1, heads, -1).nonzero(as_tuple=True)
        position = held.positions.expand(-1, heads, -1)[row, head, at]
        keys = held.keys[row, head, at]
        self.host.write(row, head, position, [keys, held.values[row, head, at]])
        if self.summaries.vectors:
            self.summaries.reserve(blocks, most)
            new, which = (row * blocks + position // size).unique(return_inverse=True)
            whole = keys.new_empty(len(new), heads, size, keys.shape[-1])
            whole[which, head, position % size] = keys
            self.summaries.put(new // blocks, new % blocks, whole)
        self.stored = now

    def away(self, positions: Tensor) -> Iterator[Part]:
        """Yield all tokens that are not in the slots, a few blocks at a time.

        Args:
            positions: `[B, S, C]` positions of the tokens in the slots.
        """
        size, stored = self._size, int(self.stored.max())
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

    # ---- rows and saving ------------------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """Replace row `i` by row `rows[i]`."""
        self.host.select(rows)
        self.summaries.select(rows)
        self.stored, self.due, self.wanted_at = map_tensors(
            lambda tensor: tensor[rows], (self.stored, self.due, self.wanted_at)
        )

    def state_dict(self) -> StateDict:
        """All of it by name."""
        blocks = int(self.stored.max())
        vectors = [vectors[:, :, :blocks] for vectors in self.summaries.vectors]
        states = {"states": self.host.first(blocks), **dict(zip(_VECTORS, vectors, strict=False))}
        return {**states, "stored": self.stored, "due": self.due, "wanted_at": self.wanted_at}

    def load_state(self, saved: StateDict) -> None:
        """Restore the state of another archive.

        Raises:
            ValueError: blocks are missing.
        """
        stored = in_range("stored", saved["stored"], 0, saved["states"].shape[2])
        self.host.fill(saved["states"])
        self.summaries.fill([saved[name] for name in _VECTORS[: len(self.summaries.vectors)]])
        self.stored, self.due, self.wanted_at = stored, saved["due"], saved["wanted_at"]

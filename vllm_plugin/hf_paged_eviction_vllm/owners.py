"""Which request each block of vLLM was given to: no forward may touch blocks of another request."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.integer]


@dataclass
class Holding:
    """The blocks of one request, as the workers were told.

    Attributes:
        number: counts requests, from 1.
        shown: number of entries of its table that are known.
        kept: `[blocks]` those of its first blocks that it keeps.
        name: the id of the request, for messages.
    """

    number: int
    shown: int
    kept: Blocks
    name: str


class Owners:
    """The request that each block was last given to.

    vLLM gives a block to another request only after it took it from the first one. So a request whose blocks belong to
    another one has lost them: its forward would read keys of a stranger, or overwrite them.

    Args:
        blocks: number of blocks of the pool.
    """

    def __init__(self, blocks: int) -> None:
        self._of_block = np.zeros(blocks, dtype=np.int64)
        self._last = 0

    def begin(self, blocks: Blocks, shown: int, name: str) -> Holding:
        """A request with this id begins, with these blocks that it keeps and `shown` entries of its table filled."""
        self._last += 1
        self._of_block[blocks] = self._last
        return Holding(self._last, shown, blocks.copy(), name)

    def is_intact(self, holding: Holding) -> bool:
        """Whether no other request was given a block that this one keeps."""
        return bool((self._of_block[holding.kept] == holding.number).all())

    def check(self, holding: Holding, table: Blocks, kept: int, seen: int, entries: int) -> None:
        """Note the blocks that a request was given since its last forward, and check those that this one touches.

        Args:
            table: `[entries or more]` its blocks.
            kept: number of its first blocks that it keeps.
            seen: number of slots before those of new tokens, as whole blocks.
            entries: number of blocks up to the last new token.

        Raises:
            RuntimeError: vLLM holds one of these blocks for another request.
        """
        if entries > holding.shown:
            self._of_block[table[holding.shown : entries]] = holding.number
            holding.shown = entries
            if len(holding.kept) < kept:
                holding.kept = table[: min(kept, entries)].copy()
        touched = np.concatenate([holding.kept, table[seen:entries]])
        wrong = touched[(self._of_block[touched] != holding.number) | (touched == 0)]
        if len(wrong):
            raise RuntimeError(
                f"paged_eviction: block {int(wrong[0])} of request {holding.name} was "
                "given to another request. Its keys would be read by a stranger, so the engine stops. Report this, "
                "with the options of the server."
            )

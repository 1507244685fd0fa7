"""The pages of sets: how the heads of a layer share its blocks.

A *set* is a layer's KV heads together, or one of them where heads evict for themselves. A *page* is the part of one
block that belongs to one set. Page `number` of a request is set `number % sets` of its block `number // sets`.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_paged_eviction.internals import Shares, Spans

logger = logging.getLogger("vllm.paged_eviction")

Numbers = NDArray[np.int64]


@lru_cache(maxsize=128)
def pages_of(limits: tuple[int, ...], sets: int, slots: int) -> Numbers:
    """The pages of each set, `[sets of all layers, largest number]`, in the first blocks of a request.

    As many blocks as there are pages for each layer. The first pages of a set are its own of each block, so nothing
    moves while it grows. Sets that need more get those that others leave.

    Args:
        limits: tokens of each set, layer by layer.
        sets: sets of a layer.
        slots: tokens of a page.
    """
    counts = -(-np.array(limits) // slots)
    pages = np.arange(counts.max()) * sets + np.arange(len(limits))[:, None] % sets
    for first in range(0, len(limits), sets):
        own = counts[first : first + sets]
        blocks = -(-own.sum() // sets)
        spare = [block * sets + at for block in range(blocks) for at in range(sets) if block >= own[at]]
        for at, count in enumerate(own):
            more = max(int(count) - blocks, 0)
            pages[first + at, blocks : blocks + more] = spare[:more]
            del spare[:more]
    return pages


def fit(limits: Numbers, blocks: int, slots: int) -> Numbers:
    """Cut the largest sets of a layer until its pages fit into the blocks, with a line in the log.

    The blocks are reckoned with the server's own sizes; a request with spans of its own, or with a smaller budget, may
    by a few tokens come to other shares. `limits` are `[layers, sets]` tokens.
    """
    most = blocks * limits.shape[1]
    if (-(-limits // slots)).sum(-1).max() <= most:
        return limits
    limits = limits.copy()
    for layer in limits:
        while (-(-layer // slots)).sum() > most:
            largest = layer.argmax()
            layer[largest] = (-(-layer[largest] // slots) - 1) * slots
    logger.warning("The shares of a request's heads need more than %d blocks; the largest are cut to fit.", blocks)
    return limits


class GroupShares(Shares):
    """The shares of the layers and heads that a group has in this process.

    Args:
        shares: arguments of `Shares`, for all layers that evict.
        places: the layers of the group, as indices among those.
        heads: its sets of each layer, among the KV heads of the model.
        blocks: blocks that a request keeps after so many tokens.
        slots: tokens of a page.
    """

    def __init__(
        self, *shares: Any, places: Sequence[int], heads: slice, blocks: Callable[[int], int], slots: int
    ) -> None:
        super().__init__(*shares)
        self._places, self._heads, self._blocks, self._page = places, heads, blocks, slots

    def limits(self, seen: int, spans: Spans) -> list[int]:
        """See `Shares.limits`."""
        if self._equal is not None:
            return self._equal
        every, sets = self.of_layers([seen], spans), self._heads.stop - self._heads.start
        own = [every[place][0] for place in self._places]
        rows = [share.expand(sets) if len(share) == 1 else share[self._heads] for share in own]
        return fit(np.stack([row.numpy() for row in rows]), self._blocks(seen), self._page).ravel().tolist()

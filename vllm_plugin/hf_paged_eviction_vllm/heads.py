"""The pages of sets: how the layers and heads of a request share its blocks.

A *set* is a layer's KV heads together, or one of them where heads evict for themselves. A *page* is the part of one
block that belongs to one set. Page `number` of a request is set `number % sets` of its block `number // sets`, with the
sets of all layers in one row.
"""

import logging
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_paged_eviction.internals import Shares, Spans

logger = logging.getLogger("vllm.paged_eviction")

Numbers = NDArray[np.int64]

#: Lengths of text that are tried together: a quarter of a second for 90 heads.
AT_ONCE = 1 << 10


@lru_cache(maxsize=128)
def pages_of(limits: tuple[int, ...], slots: int) -> Numbers:
    """The pages of each set, `[sets, largest number]`, in the first blocks of a request.

    As many blocks as there are pages for each set. The first pages of a set are its own of each block, so nothing moves
    while it grows. Sets that need more get those that others leave.

    Args:
        limits: tokens of each set.
        slots: tokens of a page.
    """
    counts, sets = -(-np.array(limits) // slots), len(limits)
    pages = np.arange(counts.max()) * sets + np.arange(sets)[:, None]
    blocks = -(-counts.sum() // sets)
    spare = np.arange(blocks * sets).reshape(blocks, sets)[np.arange(blocks)[:, None] >= counts]
    more = np.arange(blocks, counts.max()) < counts[:, None]  # [sets, pages beyond the blocks]
    pages[:, blocks:][more] = spare[: more.sum()]
    return pages


def fit(limits: Numbers, blocks: int, slots: int) -> Numbers:
    """Cut the largest sets until their pages fit into the blocks, with a line in the log.

    Only where heads are divided among processes, and requests have smaller budgets, whose shares are others.
    """
    most = blocks * len(limits)
    if (-(-limits // slots)).sum() <= most:
        return limits
    limits = limits.copy()
    while (-(-limits // slots)).sum() > most:
        largest = limits.argmax()
        limits[largest] = (-(-limits[largest] // slots) - 1) * slots
    logger.warning("The shares of a request's heads need more than %d blocks; the largest are cut to fit.", blocks)
    return limits


class LocalShares(Shares):
    """The shares of the layers and heads that a group has in this process.

    Args:
        shares: arguments of `Shares`, for all layers that evict.
        places: the layers of the group, as indices among those.
        heads: its sets of each layer, among the KV heads of the model.
        blocks: blocks that a request keeps.
        slots: tokens of a page.
    """

    def __init__(self, *shares: Any, places: list[int], heads: slice, blocks: int, slots: int) -> None:
        super().__init__(*shares)
        self._places, self._local, self._blocks, self._page = places, heads, blocks, slots

    def limits(self, seen: int, spans: Spans) -> list[int]:
        """See `Shares.limits`."""
        sets = self._local.stop - self._local.start
        if self._equal is not None:
            return [self.capacity] * (len(self._places) * sets)
        every = self.of_layers([seen], spans)
        own = [every[place][0] for place in self._places]
        rows = [share.expand(sets) if len(share) == 1 else share[self._local] for share in own]
        limits: list[int] = fit(np.concatenate([row.numpy() for row in rows]), self._blocks, self._page).tolist()
        return limits


def largest_part(shares: Shares, heads: int, parts: int, longest: int) -> float:
    """How much more than their number some process's heads need, of `parts`, for any length of text.

    Every length is tried until the shares are those of the longest text and stay so.
    """
    last, most = max(longest, shares.foreseen or 0) + 1, 1.0
    for first in range(shares.capacity, last + 1, AT_ONCE):
        lengths = [*range(first, min(first + AT_ONCE, last + 1)), last]
        tokens = np.stack([share.expand(-1, heads).numpy() for share in shares.of_layers(lengths, ())])
        of_parts = tokens.reshape(*tokens.shape[:2], parts, -1).mean((0, 3))
        most = max(most, float(of_parts.max()) / shares.capacity)
        if (tokens == tokens[:, -1:]).all():
            break
    return most

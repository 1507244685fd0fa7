"""How many tokens each set of a request holds, and in which pages.

A *set* is a layer's KV heads together, or one of them where heads evict for themselves. A *page* is the part of one
block that belongs to one set. Page `number` of a request is set `number % sets` of its block `number // sets`.
"""

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("vllm.paged_eviction")

#: Integers by layer and set, `[L, S]`, or `[1, 1]` where all are equal.
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Sets:
    """The sets of a request, all layers together.

    A set takes in tokens until it is full; after that, new tokens overwrite block after block.

    Attributes:
        limits: tokens that each set may hold.
        full_at: tokens that the request has seen when each set becomes full.
    """

    limits: Numbers
    full_at: Numbers

    @classmethod
    def equal(cls, capacity: int) -> "Sets":
        """All sets hold as many tokens."""
        limits = np.full((1, 1), capacity)
        return cls(limits, limits)

    def choosing(self, limits: Numbers, seen: int, new: int) -> "Sets":
        """The sets after each has kept the best of its tokens and of `new` ones, with `seen` tokens seen."""
        return Sets(limits, seen + np.maximum(limits - self.held(seen - new) - new, 0))

    def held(self, seen: int) -> Numbers:
        """Tokens in each set, after `seen` tokens."""
        return self.limits - np.maximum(self.full_at - seen, 0)

    @cached_property
    def growing_until(self) -> int:
        """Tokens seen when the first set becomes full."""
        return int(self.full_at.min())

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(self.full_at.ravel().tolist())

    def is_due(self, seen: int, block_size: int) -> bool:
        """Whether the next token begins a block in some set."""
        return any((seen - end) % block_size == 0 for end in self._ends)

    def in_step(self, block_size: int) -> bool:
        """Whether the blocks of all sets become full at the same time."""
        return len({end % block_size for end in self._ends}) == 1


def pages_of(limits: Numbers, blocks: int, slots: int) -> NDArray[np.int64]:
    """The pages of each set, `[L, S, largest number]`.

    The first `blocks` pages of a set are its own of each block. Sets that need more get those that others leave.

    Args:
        limits: `[L, S]` tokens of each set; `fit` has made sure that there are pages for them.
        blocks: blocks of a request.
        slots: tokens of a page.
    """
    layers, sets = limits.shape
    counts = -(-limits // slots)
    width = int(counts.max())
    numbers = np.arange(width)[None, None, :] * sets + np.arange(sets)[None, :, None]
    pages = np.broadcast_to(numbers, (layers, sets, width)).copy()
    for layer, own in enumerate(counts) if width > blocks else ():
        spare = [block * sets + at for block in range(blocks) for at in range(sets) if block >= own[at]]
        for at in range(sets):
            more = max(int(own[at]) - blocks, 0)
            pages[layer, at, blocks : blocks + more] = spare[:more]
            del spare[:more]
    return pages


def fit(limits: Numbers, blocks: int, slots: int) -> Numbers:
    """Cut the largest sets of a layer until its pages fit into the blocks, with a line in the log.

    The blocks are reckoned for all lengths of text with the server's own sizes; a request with spans of its own, or
    with a smaller budget, may by a few tokens come to other shares.
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


def blocks_for(limits: Any, slots: int) -> int:
    """Blocks that hold the pages of the sets of the largest layer, `limits` `[L, S]`."""
    pages = (-(-np.asarray(limits) // slots)).sum(-1)
    return int(-(-pages.max() // np.asarray(limits).shape[1]))

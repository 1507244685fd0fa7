"""Summaries of blocks on the device, which tell a query which blocks it needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged_eviction.internals import DROP, byte_count, persistent, rank_keys


class Summaries:
    """Vectors of each block and KV head.

    Two ("box"): the largest and the smallest number of each channel of a block's keys. For a query `q` the sum over
    channels of `max(q * high, q * low)` is at least as large as its product with any key of the block (Quest, arXiv
    2406.10774).

    One ("vector"): 0.6 times the largest plus 0.4 times the smallest number of each channel (MPCache, arXiv
    2501.06807). It takes half the memory, and its product with `q` is no bound.

    Attributes:
        vectors: `[B, H, N, D]` each, in the dtype of the keys.

    Args:
        count: number of vectors; 0 if another layer chooses.
        like: `[B, H, n, D]` keys of the layer.
    """

    def __init__(self, count: int, like: Tensor) -> None:
        self.vectors = [like.new_zeros(*like.shape[:2], 0, like.shape[-1]) for _ in range(count)]

    @property
    def bytes(self) -> int:
        """Bytes on the device, used or not."""
        return byte_count(*self.vectors)

    def reserve(self, blocks: int, most: int | None = None) -> None:
        """Make room for so many blocks and a few more, at most `most`."""
        held = self.vectors[0].shape[2]
        if blocks > held:
            room = blocks + max(8, blocks // 16)
            missing = (room if most is None else min(room, most)) - held
            self.fill([torch.nn.functional.pad(vectors, (0, 0, 0, missing)) for vectors in self.vectors])

    def put(self, row: Tensor, block: Tensor, keys: Tensor) -> None:
        """Summarise blocks: `row`, `block` `[m]` int64, `keys` `[m, H, P, D]`."""
        high, low = keys.amax(2), keys.amin(2)
        new = [high, low] if len(self.vectors) == 2 else [0.6 * high + 0.4 * low]
        for vectors, of_blocks in zip(self.vectors, new, strict=True):
            vectors[row, :, block] = of_blocks

    def scores(self, query: Tensor) -> Tensor:
        """Score all blocks for a single query `[B, query_heads, 1, D]`: `[B, H, N]` float32, mean over the group."""
        grouped = query[:, :, 0].float().unflatten(1, (self.vectors[0].shape[1], -1))  # [B, H, G, D]
        if len(self.vectors) == 1:
            return _products(grouped.mean(2), self.vectors[0])
        # The mean of the bounds: each query head takes `high` where it is positive and `low` where it is not.
        above, below = grouped.clamp_min(0).mean(2), grouped.clamp_max(0).mean(2)
        return _products(above, self.vectors[0]) + _products(below, self.vectors[1])

    def select(self, rows: Tensor) -> None:
        """Replace row `i` by row `rows[i]`."""
        self.fill([vectors[rows] for vectors in self.vectors])

    def fill(self, vectors: Sequence[Tensor]) -> None:
        """Replace all summaries by copies of these."""
        self.vectors = [*map(persistent, vectors)]


def _products(vectors: Tensor, summaries: Tensor) -> Tensor:
    return (summaries.float() @ vectors[..., None])[..., 0]


@dataclass(frozen=True)
class Choice:
    """The blocks that a query chose.

    Attributes:
        chosen: `[B, S, N]` bool, the best blocks.
        ids: `[B, S, K]` int64, the chosen blocks, best first.
        next: `[B, S, n]` int64, the next best blocks, for prefetching; -1 = none.
    """

    chosen: Tensor
    ids: Tensor
    next: Tensor

    @classmethod
    def of(cls, scores: Tensor, allowed: Tensor, count: int, ahead: int) -> "Choice":
        """Choose the best blocks.

        Args:
            scores: `[B, S, N]` float32.
            allowed: `[B, S, N]` bool, which of them may be chosen.
            count: number of blocks to choose.
            ahead: number of blocks in `next`.
        """
        blocks = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        keys = rank_keys(scores, blocks, allowed, absolute_noise=True)
        best, ids = keys.topk(min(count + ahead, keys.shape[-1]), dim=-1)
        chosen = torch.zeros_like(allowed).scatter(-1, ids[..., :count], best[..., :count] > DROP)
        return cls(chosen, ids[..., :count], ids.masked_fill(best == DROP, -1)[..., count:])

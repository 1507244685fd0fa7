"""Summaries of blocks on the device, which tell a query which blocks it needs."""

from typing import Literal

import torch
from torch import Tensor

from ...store.tensors import byte_count
from ...tensors.parts import persistent

Kind = Literal["box", "vector"]


class Summaries:
    """One or two vectors per block and KV head.

    "box": the largest and the smallest number of each channel of a block's keys. For a query `q` the sum over channels
    of `max(q * high, q * low)` is at least as large as its product with any key of the block (Quest, arXiv 2406.10774).

    "vector": 0.6 times the largest plus 0.4 times the smallest number of each channel (MPCache, arXiv 2501.06807). It
    takes half the memory, and its product with `q` is no bound.

    Attributes:
        kind: "box" or "vector".
        low, high: `[B, H, N, D]` in the dtype of the keys; `low` is empty for "vector".

    Args:
        kind: see above.
        like: `[B, H, n, D]` keys of the layer.
    """

    def __init__(self, kind: Kind, like: Tensor) -> None:
        self.kind = kind
        self.high = like.new_zeros(*like.shape[:2], 0, like.shape[-1])
        self.low = self.high

    @property
    def bytes(self) -> int:
        """Bytes on the device, used or not."""
        return byte_count(self.high) if self.kind == "vector" else byte_count(self.high, self.low)

    def reserve(self, blocks: int, most: int | None = None) -> None:
        """Make room for so many blocks and a few more, at most `most`."""
        if blocks > self.high.shape[2]:
            room = blocks + max(8, blocks // 16)
            missing = (room if most is None else min(room, most)) - self.high.shape[2]
            self.high = _longer(self.high, missing)
            self.low = _longer(self.low, missing) if self.kind == "box" else self.low

    def put(self, row: Tensor, block: Tensor, keys: Tensor) -> None:
        """Summarise blocks: `row`, `block` `[m]` int64, `keys` `[m, H, P, D]`."""
        high, low = keys.amax(2), keys.amin(2)
        if self.kind == "vector":
            self.high[row, :, block] = 0.6 * high + 0.4 * low
        else:
            self.high[row, :, block], self.low[row, :, block] = high, low

    def scores(self, query: Tensor) -> Tensor:
        """Score all blocks for a single query `[B, query_heads, 1, D]`: `[B, H, N]` float32, mean over the group."""
        grouped = query[:, :, 0].float().unflatten(1, (self.high.shape[1], -1))  # [B, H, G, D]
        if self.kind == "vector":
            return _products(grouped.mean(2), self.high)
        # The mean of the bounds: each query head takes `high` where it is positive and `low` where it is not.
        above, below = grouped.clamp_min(0).mean(2), grouped.clamp_max(0).mean(2)
        return _products(above, self.high) + _products(below, self.low)

    def select(self, rows: Tensor) -> None:
        """Replace row `i` by row `rows[i]`."""
        self.high, self.low = persistent(self.high[rows]), persistent(self.low[rows])

    def first(self, blocks: int) -> tuple[Tensor, Tensor]:
        """`high` and `low` of the first blocks, views."""
        return self.high[:, :, :blocks], self.low[:, :, :blocks]

    def fill(self, high: Tensor, low: Tensor) -> None:
        """Replace all summaries by these."""
        self.high = persistent(high)
        self.low = persistent(low) if self.kind == "box" else self.high[:, :, :0]


def _longer(summaries: Tensor, missing: int) -> Tensor:
    return persistent(torch.nn.functional.pad(summaries, (0, 0, 0, missing)))


def _products(vectors: Tensor, summaries: Tensor) -> Tensor:
    return (summaries.float() @ vectors[..., None])[..., 0]

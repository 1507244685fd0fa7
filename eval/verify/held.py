"""Record the tokens that a cache holds at each forward, and so the tokens that every query can see."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache

from .text import BLOCK_SIZE, Text


class BrokenPromise(Exception):  # noqa: N818 (what happened)
    """The cache holds too much, or lacks a token that it must hold; the message says which."""


class HeldRecord:
    """Records the held tokens of a cache between its forwards.

    A forward of several tokens sees the tokens held before it and, causally, its own tokens. A single token sees the
    tokens held after it, because it overwrites its slot before attention.

    Args:
        cache: an empty cache.
        text: the text that will be fed.
        budget: mean number of tokens of a layer or head.
        limits: `[1 or kv_heads]` tokens of each paged layer, computed independently of the cache. Until a row is longer
            than the largest of them, its heads may hold the mean.
    """

    def __init__(self, cache: PagedEvictionCache, text: Text, budget: int, limits: Sequence[Tensor]) -> None:
        self._cache, self._text, self._budget, self._limits = cache, text, budget, limits
        self._settled = max((int(limit.max()) for limit in limits), default=0)
        self._pads = torch.tensor(text.pads, device=text.ids.device)
        self._columns = torch.arange(text.length, device=text.ids.device)
        #: By layer: `[rows, kv_heads, columns]` bool, held now; `[rows, kv_heads, queries, columns]` bool.
        self.held: dict[int, Tensor] = {}
        self.visible: dict[int, Tensor] = {}

    def after(self, start: int, stop: int) -> None:
        """Record the held tokens after the forward of these columns.

        Raises:
            BrokenPromise: a layer holds too many tokens, a token twice, or lacks a protected token.
        """
        columns, length = self._columns, self._text.length
        own = (columns <= columns[start:stop, None]) & (columns >= start) & self._text.mask.bool()[:, None, None]
        for (index, layer), limits in zip(self._cache.paged_layers, self._limits, strict=True):
            positions = layer.positions.to(columns.device)  # [rows, kv_heads, slots], -1 for a pad
            at = torch.where(positions < 0, length, positions + self._pads[:, None, None]).clamp_max(length)
            now = torch.zeros(*at.shape[:2], length + 1, dtype=torch.bool, device=at.device)
            now = now.scatter_(2, at, True)[..., :length]
            self._check(index, limits.to(columns.device), positions, now, stop)
            before = self.held.get(index, torch.zeros_like(now))
            visible = self.visible.setdefault(index, now.new_zeros(*now.shape[:2], length, length))
            visible[:, :, start:stop] = now[:, :, None] if stop - start == 1 else before[:, :, None] | own
            self.held[index] = now

    def _check(self, index: int, limits: Tensor, positions: Tensor, held: Tensor, stop: int) -> None:
        most, counts = max(int(limits.max()), self._budget), held.sum(-1)
        if positions.shape[-1] > most:
            raise BrokenPromise(f"layer {index} holds {positions.shape[-1]} tokens at a budget of {most}")
        if (counts != (positions >= 0).sum(-1)).any():
            raise BrokenPromise(f"layer {index} holds a token twice, or one that it has not seen")
        settled = (stop - self._pads >= self._settled)[:, None]
        if (settled & (counts != limits)).any():
            raise BrokenPromise(
                f"the heads of layer {index} hold {counts.tolist()} tokens of each row at budgets of {limits.tolist()}"
            )
        place = self._columns - self._pads[:, None]
        ends = (place < BLOCK_SIZE) | (self._columns >= stop - BLOCK_SIZE)
        if (((place >= 0) & (self._columns < stop) & ends)[:, None] & ~held).any():
            raise BrokenPromise(f"layer {index} evicted a token of the first or of the newest block")

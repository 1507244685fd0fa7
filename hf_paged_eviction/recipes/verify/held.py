"""What a cache held at each forward, and so what every query could attend to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...cache import PagedEvictionCache
from .text import Text


class BrokenPromise(Exception):  # noqa: N818 (what happened)
    """The cache holds what it must not, or does not hold what it must; the message says which."""


class HeldRecord:
    """Follows a cache through its forwards, from outside: it looks only between them.

    A forward of several tokens sees what was held before it and, causally, its own tokens. A single token sees what is
    held after it, because it overwrites its slot before it attends.

    Args:
        cache: empty.
        text: that will be fed.
        budgets: what each paged layer was asked to hold; the cache's own word is not taken for it.
        block_size: tokens per block.
    """

    def __init__(self, cache: PagedEvictionCache, text: Text, budgets: Sequence[int], block_size: int) -> None:
        self._cache, self._text, self._budgets, self._block_size = cache, text, budgets, block_size
        self._pads = torch.tensor(text.pads, device=text.ids.device)
        self._held: dict[int, Tensor] = {}
        #: By layer, `[rows, kv_heads, queries, columns]` bool, on the device of the text.
        self.visible: dict[int, Tensor] = {}

    def after(self, start: int, stop: int) -> None:
        """Take note of the forward of these columns.

        Raises:
            BrokenPromise: a layer holds too much, a token twice, or not what is protected.
        """
        for (index, layer), budget in zip(self._cache.paged_layers, self._budgets, strict=True):
            positions = layer.positions.to(self._text.ids.device)
            now = self._columns(positions)
            self._check(index, budget, positions, now, stop)
            before = self._held.get(index, torch.zeros_like(now))
            if index not in self.visible:
                self.visible[index] = now.new_zeros(*now.shape[:2], self._text.length, self._text.length)
            self.visible[index][:, :, start:stop] = (
                now[:, :, None] if stop - start == 1 else before[:, :, None] | self._own(start, stop)
            )
            self._held[index] = now

    def _columns(self, positions: Tensor) -> Tensor:
        """`[rows, heads, columns]` bool from positions `[rows, heads, slots]`, -1 for a pad."""
        rows, heads, _ = positions.shape
        length = self._text.length
        columns = torch.where(positions < 0, length, positions + self._pads[:, None, None])
        held = torch.zeros(rows, heads, length + 1, dtype=torch.bool, device=positions.device)
        return held.scatter_(2, columns.clamp_max(length), True)[..., :length]

    def _own(self, start: int, stop: int) -> Tensor:
        """`[rows, 1, queries, columns]` bool: tokens of this forward that its queries may attend to."""
        columns = torch.arange(self._text.length, device=self._text.ids.device)
        queries = columns[start:stop, None]
        causal = (columns <= queries) & (columns >= start)
        return causal & self._text.mask.bool()[:, None, None, :]

    def _check(self, index: int, budget: int, positions: Tensor, held: Tensor, stop: int) -> None:
        if positions.shape[-1] > budget:
            raise BrokenPromise(f"layer {index} holds {positions.shape[-1]} tokens at a budget of {budget}")
        if (held.sum(-1) != (positions >= 0).sum(-1)).any():
            raise BrokenPromise(f"layer {index} holds a token twice, or one that it has not seen")
        columns = torch.arange(self._text.length, device=held.device)
        place, newest = columns - self._pads[:, None], stop - self._block_size
        protected = (place >= 0) & (columns < stop) & ((place < self._block_size) | (columns >= newest))
        if (protected[:, None] & ~held).any():
            raise BrokenPromise(f"layer {index} evicted a token of the first or of the newest block")

    def same_tokens(self, other: "HeldRecord", row: int) -> bool:
        """Whether that row of this record ends with the tokens of the only row of the other."""
        pads, fed = int(self._pads[row]), other._text.length
        return all(torch.equal(held[row, :, pads : pads + fed], other._held[i][0]) for i, held in self._held.items())

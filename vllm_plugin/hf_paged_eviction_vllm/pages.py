"""Keys and values in the blocks of a layer, read and written by page.

Each backend lays out its blocks in its own way; `Pages` knows how.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Pages(ABC):
    """The blocks of one layer, as pages of the sets.

    Shapes: `G` KV heads of a set, `N` slots of a page, `D` head size, `V` value size. A page is numbered
    `block * sets + set`, a slot of it `page * N + place`.

    Attributes:
        memory: `[pages, G, N, D + V]`, what attention is given.

    Args:
        cache: the layer's cache `[blocks, KV heads, N, D + V]`, as vLLM made it.
        sets: number of sets.
        layer: the attention layer.
        dim: `D`.
    """

    def __init__(self, cache: Tensor, sets: int, layer: Any, dim: int) -> None:
        blocks, heads, slots, content = cache.shape
        # Heads of a set may lie apart; then the view fails, and vLLM says which layout there is.
        self.memory = cache.view(blocks * sets, heads // sets, slots, content) if sets > 1 else cache
        self.slots, self.dim, self.layer = slots, dim, layer

    @abstractmethod
    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write `[n, G, D]` and `[n, G, V]` to the slots `[n]` int64."""

    @abstractmethod
    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the pages `[..., m]`: keys and values `[..., m, G, N, D]`."""

    @abstractmethod
    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the slots `[n]`: keys and values `[n, G, D]`."""


class PlainPages(Pages):
    """Keys and values of a token lie one behind the other: the layout of most backends."""

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read`."""
        content = self.memory[pages]
        return content[..., : self.dim], content[..., self.dim :]

    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read_slots`."""
        content = self.memory[self._where(slots)]
        return content[..., : self.dim], content[..., self.dim :]

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `Pages.write`."""
        self.memory[self._where(slots)] = torch.cat([keys, values], dim=-1)

    def _where(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = torch.arange(self.memory.shape[1], device=slots.device)
        return (slots // self.slots)[:, None], heads, (slots % self.slots)[:, None]

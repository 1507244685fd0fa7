"""Keys and values in vLLM's blocks.

Each backend lays out its blocks in its own way; `LayerPages` knows how.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import ALL, Pages

from .heads import pages_of


class LayerPages(ABC):
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


class PlainPages(LayerPages):
    """Keys and values of a token lie one behind the other: the layout of most backends."""

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerPages.read`."""
        content = self.memory[pages]
        return content[..., : self.dim], content[..., self.dim :]

    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerPages.read_slots`."""
        content = self.memory[self._where(slots)]
        return content[..., : self.dim], content[..., self.dim :]

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `LayerPages.write`."""
        self.memory[self._where(slots)] = torch.cat([keys, values], dim=-1)

    def _where(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = torch.arange(self.memory.shape[1], device=slots.device)
        return (slots // self.slots)[:, None], heads, (slots % self.slots)[:, None]


class GroupPages(Pages):
    """The blocks of the layers of a group, see `Pages`. Rows are those of requests; `W` pages of a set at most.

    Attributes:
        layers: the blocks of each layer.
        blocks: `[R, width]` int32, blocks of each request, as of the present forward.
        own: `[R, Q, W]` int32, see `pages_of`; None if all sets are equal: then each has its page of every block.

    Args:
        sets: sets of a layer.
        rows: `R`.
        width: most blocks of a request, those of new tokens included.
        kept: most blocks that a request keeps.
        unequal: whether sets differ.
    """

    def __init__(
        self, layers: Sequence[LayerPages], sets: int, rows: int, width: int, kept: int, unequal: bool
    ) -> None:
        self.layers, self.sets, self.slots = layers, sets, layers[0].slots
        memory = layers[0].memory
        self.device, self._of_layer = memory.device, len(memory) * self.slots
        self.size = self._of_layer * len(layers)
        self._sets = torch.arange(len(layers) * sets, device=self.device)
        self.blocks = torch.zeros(rows, width, dtype=torch.int32, device=self.device)
        self.own: Tensor | None = None
        if unequal:
            self._equal = torch.arange(kept * sets, device=self.device) * sets + self._sets[:, None] % sets
            self.own = self._equal.int().repeat(rows, 1, 1)

    def begin(self, number: int) -> None:
        """A request takes a row."""
        if self.own is not None:
            self.own[number] = self._equal

    def give(self, number: int, limits: Sequence[int], sets: slice = ALL) -> None:
        """See `Pages.give`."""
        if self.own is not None:
            pages = torch.from_numpy(pages_of(tuple(limits), self.sets, self.slots)[sets])
            self.own[number, sets, : pages.shape[1]] = pages.to(self.device)

    def places(self, rows: Tensor, at: Tensor, sets: slice | Tensor = ALL) -> Tensor:
        """See `Pages.places`."""
        pages = self._of_requests(rows, self._numbers(rows, at // self.slots, self._sets[sets]))
        return self.places_in(pages, at % self.slots, sets)

    def places_in(self, pages: Tensor, at: Tensor, sets: slice | Tensor = ALL) -> Tensor:
        """The places `at` in these pages."""
        before = self._sets[sets] // self.sets * self._of_layer
        return before[:, None] + pages * self.slots + at

    def while_reading(self, rows: Tensor, at: Tensor, held: Tensor, seen: Tensor, chooses: Tensor) -> Tensor:
        """The `at`-th pages `[n, Q, m]` of sets, in a forward: those they hold, then those of blocks of new tokens.

        Args:
            rows: `[n]`.
            at: `[n or 1, Q or 1, m]`.
            held: `[n, Q]` tokens held before.
            seen: `[n]` tokens seen before.
            chooses: `[n]` bool, whether new tokens are more than fit. If not, they come into the pages of the set.
        """
        own, numbers = -(-held // self.slots)[..., None], self._numbers(rows, at, self._sets)
        new = (seen // self.slots)[:, None, None].maximum(own) + at - own
        beyond = (at >= own) & chooses[:, None, None]
        return self._of_requests(rows, torch.where(beyond, new * self.sets + self._sets[:, None] % self.sets, numbers))

    def _numbers(self, rows: Tensor, at: Tensor, sets: Tensor) -> Tensor:
        """Numbers of the `at`-th pages of these sets."""
        if self.own is None:
            return at * self.sets + sets[:, None] % self.sets
        return self.own[rows[:, None, None], sets[:, None], at.clamp_max(self.own.shape[-1] - 1)].long()

    def _of_requests(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """The pages with these numbers `[n or 1, ., .]` of requests."""
        at = (numbers // self.sets).clamp_max(self.blocks.shape[1] - 1)
        return self.blocks[rows[:, None, None], at].long() * self.sets + numbers % self.sets

    def write(self, layer: int, places: Tensor, states: tuple[Tensor, ...]) -> None:
        """See `Pages.write`."""
        keys, values = states
        self.layers[layer].write(keys, values, places - layer * self._of_layer)

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read`."""
        states = self.layers[layer].read_slots(places.flatten() - layer * self._of_layer)
        keys, values = (part.view(*places.shape, *part.shape[1:]).transpose(2, 3).flatten(1, 2) for part in states)
        return keys, values

    def read_first(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read_first`: whole pages, which are faster."""
        pages = (places[..., :: self.slots] - layer * self._of_layer) // self.slots  # [n, S, m]
        states = self.layers[layer].read(pages)  # [n, S, m, G, N, D]
        keys, values = (part.transpose(2, 3).flatten(3, 4).flatten(1, 2) for part in states)
        return keys[:, :, : places.shape[-1]], values[:, :, : places.shape[-1]]

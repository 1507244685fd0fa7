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
    """The blocks of all layers that evict, as pages of the sets.

    Shapes: `G` KV heads of a set, `N` slots of a page, `D` head size, `V` value size. Pages are numbered by layer,
    block and set; a slot of one is numbered `page * N + place`.

    Attributes:
        memory: `[pages, G, N, D + V]`, what attention is given.

    Args:
        caches: the cache of each layer `[blocks, KV heads, N, D + V]`, as vLLM made it.
        sets: number of sets of a layer.
        layer: an attention layer.
        dim: `D`.
    """

    def __init__(self, caches: Sequence[Tensor], sets: int, layer: Any, dim: int) -> None:
        first = min(caches, key=lambda cache: cache.storage_offset())
        blocks, heads, slots, content = first.shape
        page, starts = first.stride(0) // sets, [cache.storage_offset() - first.storage_offset() for cache in caches]
        together = {cache.untyped_storage().data_ptr() for cache in caches}
        if len(together) > 1 or any(start % page for start in starts) or first.stride(1) * heads > page * sets * slots:
            raise RuntimeError("paged_eviction: the layers of this backend do not lie one behind the other.")
        if sets > 1 and first.stride(1) * (heads // sets) != page:
            raise RuntimeError("paged_eviction: blocks of this backend are not laid out by heads.")
        self.starts = [start // page for start in starts]
        shape = (max(self.starts) + blocks * sets, heads // sets, slots, content)
        self.memory = first.as_strided(shape, (page, *first.stride()[1:]))
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
        memory: the blocks of all layers.
        blocks: `[R, width]` int32, blocks of each request, as of the present forward.
        own: `[R, Q, W]` int32, see `pages_of`; None if all sets are equal: then each has its page of every block.

    Args:
        layers: number of layers.
        sets: sets of a layer.
        rows: `R`.
        width: most blocks of a request, those of new tokens included.
        kept: most blocks that a request keeps.
        unequal: whether sets differ.
    """

    def __init__(
        self, memory: LayerPages, layers: int, sets: int, rows: int, width: int, kept: int, unequal: bool
    ) -> None:
        self.memory, self.sets, self.slots = memory, sets, memory.slots
        self.device = memory.memory.device
        self.size = len(memory.memory) * self.slots
        self._all = layers * sets
        self._numbered = torch.arange(self._all, device=self.device)
        self._starts = torch.tensor(memory.starts, device=self.device).repeat_interleave(sets) + self._numbered % sets
        self.blocks = torch.zeros(rows, width, dtype=torch.int32, device=self.device)
        self.own: Tensor | None = None
        if unequal:
            self.own = self._equal(kept).repeat(rows, 1, 1)

    def _equal(self, width: int, first: int = 0) -> Tensor:
        """Pages of sets that have one of every block."""
        return (torch.arange(first, width, device=self.device) * self._all + self._numbered[:, None]).int()

    def begin(self, number: int) -> None:
        """A request takes a row."""
        if self.own is not None:
            self.own[number] = self._equal(self.own.shape[-1])

    def give(self, number: int, limits: Sequence[int], sets: slice = ALL) -> None:
        """See `Pages.give`."""
        if self.own is None:
            return
        pages = torch.from_numpy(pages_of(tuple(limits), self.slots)[sets])
        have, width = self.own.shape[-1], pages.shape[1]
        if width > have:
            more = self._equal(width, have).expand(len(self.own), -1, -1)
            self.own = torch.cat([self.own, more], dim=-1)
        self.own[number, sets, :width] = pages.to(self.device, torch.int32)

    def places(self, rows: Tensor, at: Tensor, sets: slice | Tensor = ALL) -> Tensor:
        """See `Pages.places`."""
        pages = self._of_requests(rows, self._numbers(rows, at // self.slots, self._numbered[sets]))
        return pages * self.slots + at % self.slots

    def places_in_block(self, rows: Tensor, block: Tensor, slot: Tensor) -> Tensor:
        """Places `[n, Q]`: a slot in the page of each set in a block `[n]` of requests."""
        numbers = block[:, None, None] * self._all + self._numbered[:, None]
        return self._of_requests(rows, numbers)[..., 0] * self.slots + slot[:, None]

    def places_of_blocks(self, blocks: Tensor) -> Tensor:
        """Places `[n, Q, N]` of these blocks of vLLM `[n]`."""
        pages = blocks.long()[:, None] * self.sets + self._starts
        return pages[..., None] * self.slots + torch.arange(self.slots, device=self.device)

    def while_reading(self, rows: Tensor, at: Tensor, held: Tensor, seen: Tensor, chooses: Tensor) -> Tensor:
        """The `at`-th pages `[n, Q, m]` of sets, in a forward: those they hold, then those of blocks of new tokens.

        Args:
            rows: `[n]`.
            at: `[n or 1, Q or 1, m]`.
            held: `[n, Q]` tokens held before.
            seen: `[n]` tokens seen before.
            chooses: `[n]` bool, whether new tokens are more than fit. If not, they come into the pages of the set.
        """
        own, numbers = -(-held // self.slots)[..., None], self._numbers(rows, at, self._numbered)
        new = (seen // self.slots)[:, None, None].maximum(own) + at - own
        beyond = (at >= own) & chooses[:, None, None]
        return self._of_requests(rows, torch.where(beyond, new * self._all + self._numbered[:, None], numbers))

    def _numbers(self, rows: Tensor, at: Tensor, sets: Tensor) -> Tensor:
        """Numbers of the `at`-th pages of these sets."""
        if self.own is None:
            return at * self._all + sets[:, None]
        return self.own[rows[:, None, None], sets[:, None], at.clamp_max(self.own.shape[-1] - 1)].long()

    def _of_requests(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """The pages with these numbers `[n or 1, ., .]` of requests."""
        at, sets = (numbers // self._all).clamp_max(self.blocks.shape[1] - 1), numbers % self._all
        return self.blocks[rows[:, None, None], at].long() * self.sets + self._starts[sets]

    def write(self, layer: int, places: Tensor, states: tuple[Tensor, ...]) -> None:
        """See `Pages.write`."""
        keys, values = states
        self.memory.write(keys, values, places)

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read`."""
        states = self.memory.read_slots(places.flatten())
        keys, values = (part.view(*places.shape, *part.shape[1:]).transpose(2, 3).flatten(1, 2) for part in states)
        return keys, values

    def read_first(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read_first`: whole pages, which are faster."""
        states = self.memory.read(places[..., :: self.slots] // self.slots)  # [n, S, m, G, N, D]
        keys, values = (part.transpose(2, 3).flatten(3, 4).flatten(1, 2) for part in states)
        return keys[:, :, : places.shape[-1]], values[:, :, : places.shape[-1]]

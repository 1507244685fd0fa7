"""Keys and values in vLLM's blocks.

Each backend lays out its blocks in its own way; `LayerPages` knows how.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from hf_paged_eviction.internals import ALL, Pages

from .heads import pages_of

#: Types of 8 bits of vLLM's `--kv-cache-dtype`, with one scale per layer. Memory holds numbers divided by the scale.
FP8 = {"fp8": current_platform.fp8_dtype, "fp8_e4m3": current_platform.fp8_dtype, "fp8_e5m2": lambda: torch.float8_e5m2}


class LayerPages(ABC):
    """The blocks of all layers that evict, as pages of the sets.

    Shapes: `G` KV heads of a set, `N` slots of a page, `D` head size, `V` value size. Pages are numbered by layer,
    block and set; a slot of one is numbered `page * N + place`.

    Attributes:
        memory: `[pages, G, N, D + V]`, what attention is given.
        stored: the type of 8 bits in which numbers are stored; None = as the model computes them.

    Args:
        layers: the attention layers, whose caches `[blocks, KV heads, N, D + V]` vLLM has made.
        sets: number of sets of a layer.
        dim: `D`.
        dtype: type in which the model computes.
    """

    def __init__(self, layers: Sequence[Any], sets: int, dim: int, dtype: torch.dtype) -> None:
        caches = [layer.kv_cache for layer in layers]
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
        self.slots: int = slots
        self.dim, self.layers, self.dtype = dim, layers, dtype
        name = layers[0].kv_cache_dtype
        self.stored = FP8[name]() if name in FP8 else None

    def write_new(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """As `write`, of tokens that come from the model, rounded as the backend does it."""
        self.write(layer, keys, values, slots)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write `[n, G, D]` and `[n, G, V]` of a layer to the slots `[n]` int64; what was read does not change."""
        if self.stored is not None:
            scales, most = self._scales(layer), torch.finfo(self.stored).max
            parts = ((part / scale).clamp(-most, most) for part, scale in zip((keys, values), scales, strict=True))
            keys, values = (part.to(self.stored).view(self.memory.dtype) for part in parts)
        self._write(keys, values, slots)

    def read(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the pages `[..., m]` of a layer: keys and values `[..., m, G, N, D]`."""
        return self._as_computed(layer, self._read(pages))

    def read_slots(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the slots `[n]` of a layer: keys and values `[n, G, D]`."""
        return self._as_computed(layer, self._read_slots(slots))

    def move(self, old: Tensor, new: Tensor) -> None:
        """Copy the slots `old` to `new`, both `[n]`, of any layers, as they are stored."""
        self._write(*self._read_slots(old), new)

    @abstractmethod
    def _write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None: ...

    @abstractmethod
    def _read(self, pages: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]: ...

    def _scales(self, layer: int) -> tuple[float, float]:
        return self.layers[layer]._k_scale_float, self.layers[layer]._v_scale_float

    def _as_computed(self, layer: int, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.stored is None:
            return states
        parts = zip(states, self._scales(layer), strict=True)
        keys, values = ((part.view(self.stored).float() * scale).to(self.dtype) for part, scale in parts)
        return keys, values


class PlainPages(LayerPages):
    """Keys and values of a token lie one behind the other: the layout of most backends."""

    def _read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        content = self.memory[pages]
        return content[..., : self.dim], content[..., self.dim :]

    def _read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        content = self.memory[self._where(slots)]
        return content[..., : self.dim], content[..., self.dim :]

    def _write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
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
        self.memory.write(layer, keys, values, places)

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read`."""
        states = self.memory.read_slots(layer, places.flatten())
        keys, values = (part.view(*places.shape, *part.shape[1:]).transpose(2, 3).flatten(1, 2) for part in states)
        return keys, values

    def read_first(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read_first`: whole pages, which are faster."""
        states = self.memory.read(layer, places[..., :: self.slots] // self.slots)  # [n, S, m, G, N, D]
        keys, values = (part.transpose(2, 3).flatten(3, 4).flatten(1, 2) for part in states)
        return keys[:, :, : places.shape[-1]], values[:, :, : places.shape[-1]]

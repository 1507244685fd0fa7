"""`CPU_ATTN`: the kernels of vLLM for CPUs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from .backend import EvictingBackend, EvictingBuilder, EvictingImpl
from .pages import LayerPages


class CpuPages(LayerPages):
    """Blocks of this backend: all keys of a head, then all its values. Kernels order the numbers of a head in a way of
    their own, which depends on the processor; it is found out by writing numbers that are known.
    """

    def __init__(self, layers: Sequence[Any], sets: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__(layers, sets, dim, dtype)
        self._isa, self._kind = layers[0].isa, layers[0].kv_cache_dtype
        self._halves = self.memory.view(*self.memory.shape[:2], 2 * self.slots, dim).chunk(2, 2)
        self._order = self._find_order()

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `LayerPages.write`. The kernel cuts numbers off, so what was read once would change with some scales."""
        if self.stored is None:
            self.write_new(layer, keys, values, slots)
        else:
            super().write(layer, keys, values, slots)

    def write_new(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `LayerPages.write_new`."""
        self._store(keys, values, self._halves, slots, *self._scales(layer))

    def _store(self, keys: Tensor, values: Tensor, halves: Sequence[Tensor], slots: Tensor, *scales: float) -> None:
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, self._isa, *scales, self._kind)

    def _write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        heads, pages = torch.arange(self.memory.shape[1])[:, None], (slots // self.slots)[:, None, None]
        content, orders = self.memory.view(*self.memory.shape[:2], -1), self._order[:, slots % self.slots]
        for states, order in zip((keys, values), orders, strict=True):
            content[pages, heads, order[:, None]] = states

    def _read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        content = self.memory[pages].flatten(-2)
        found = content.index_select(-1, self._order.flatten()).unflatten(-1, (2, self.slots, self.dim))
        keys, values = found.unbind(-3)
        return keys, values

    def _read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        heads, pages = torch.arange(self.memory.shape[1])[:, None], (slots // self.slots)[:, None, None]
        content, orders = self.memory.flatten(-2), self._order[:, slots % self.slots]
        keys, values = (content[pages, heads, order[:, None]] for order in orders)
        return keys, values

    def _find_order(self) -> Tensor:
        """Where the kernels write the keys, and the values, of a head in a block: indices `[2, N, D]`.

        Raises:
            RuntimeError: they do not just write each number to a place of its own.
        """
        memory = torch.zeros(1, 1, 2 * self.slots, self.dim, dtype=self.memory.dtype)
        keys, values = halves = memory.chunk(2, dim=2)
        places, count = torch.arange(self.slots), self.slots * self.dim
        found = torch.zeros(2, count, dtype=torch.int64)
        bits = 6 if self.stored is None else 3  # numbers that are exact in any type
        for shift in range(0, (count - 1).bit_length(), bits):
            code = ((torch.arange(count) >> shift) & ((1 << bits) - 1)).to(self.dtype).view(self.slots, 1, self.dim)
            self._store(code, code, halves, places, 1.0, 1.0)
            numbers = torch.stack([keys.flatten(), values.flatten()])
            found += (numbers if self.stored is None else numbers.view(self.stored).float()).long() << shift
        if not torch.equal(found.sort().values, torch.arange(count).expand(2, -1)):
            raise RuntimeError(
                f"paged_eviction: the kernels of vLLM for this processor ({self._isa}) store {self._kind} of "
                f"{self.dtype} in a way that is not known. Start vLLM with --dtype float32."
            )
        return (found.argsort() + torch.tensor([[0], [count]])).view(2, self.slots, self.dim)


class CpuBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    """See `EvictingBuilder`."""

    pages = CpuPages


class CpuImpl(EvictingImpl, CPUAttentionBackendImpl):
    """See `EvictingImpl`."""


class CpuBackend(EvictingBackend, CPUAttentionBackend):
    """See `EvictingBackend`."""

    evicting_impl = CpuImpl
    evicting_builder = CpuBuilder

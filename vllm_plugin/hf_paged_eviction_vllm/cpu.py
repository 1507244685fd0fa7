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

    def __init__(self, caches: Sequence[Tensor], sets: int, layer: Any, dim: int) -> None:
        super().__init__(caches, sets, layer, dim)
        self._isa, self._halves = layer.isa, self.memory.view(*self.memory.shape[:2], 2 * self.slots, dim).chunk(2, 2)
        self._order = _order_of(self._isa, self.slots, dim, self.memory.dtype)

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `LayerPages.write`."""
        ops.cpu_attn_reshape_and_cache(
            keys, values, *self._halves, slots, self._isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerPages.read`."""
        content = self.memory[pages].flatten(-2)
        found = content.index_select(-1, self._order.flatten()).unflatten(-1, (2, self.slots, self.dim))
        keys, values = found.unbind(-3)
        return keys, values

    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerPages.read_slots`."""
        heads, pages = torch.arange(self.memory.shape[1])[:, None], (slots // self.slots)[:, None, None]
        content, orders = self.memory.flatten(-2), self._order[:, slots % self.slots]
        keys, values = (content[pages, heads, order[:, None]] for order in orders)
        return keys, values


def _order_of(isa: str, slots: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Where the kernels write the keys, and the values, of a head in a block: indices `[2, N, D]`.

    Raises:
        RuntimeError: they do not just write each number to a place of its own.
    """
    memory = torch.zeros(1, 1, 2 * slots, dim, dtype=dtype)
    keys, values = memory.chunk(2, dim=2)
    places, count = torch.arange(slots), slots * dim
    found = torch.zeros(2, count, dtype=torch.int64)
    for digit in range(-(-(count - 1).bit_length() // 6)):  # six bits are exact in any type
        code = ((torch.arange(count) >> (6 * digit)) & 63).to(dtype).view(slots, 1, dim)
        ops.cpu_attn_reshape_and_cache(
            code, code, keys, values, places, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        found += torch.stack([keys.flatten(), values.flatten()]).long() << (6 * digit)
    if not torch.equal(found.sort().values, torch.arange(count).expand(2, -1)):
        raise RuntimeError(
            f"paged_eviction: the kernels of vLLM for this processor ({isa}) store {dtype} in a way that is not known. "
            "Start vLLM with --dtype float32."
        )
    return (found.argsort() + torch.tensor([[0], [count]])).view(2, slots, dim)


class CpuBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    """See `EvictingBuilder`."""

    pages = CpuPages


class CpuImpl(EvictingImpl, CPUAttentionBackendImpl):
    """See `EvictingImpl`."""


class CpuBackend(EvictingBackend, CPUAttentionBackend):
    """See `EvictingBackend`."""

    evicting_impl = CpuImpl
    evicting_builder = CpuBuilder

"""`CPU_ATTN`: the kernels of vLLM for CPUs."""

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

    def __init__(self, cache: Tensor, sets: int, layer: Any, dim: int) -> None:
        super().__init__(cache, sets, layer, dim)
        self._isa, self._halves = layer.isa, self.memory.view(*self.memory.shape[:2], 2 * self.slots, dim).chunk(2, 2)
        self._key_order, self._value_order = _order_of(self._isa, self.slots, dim, cache.dtype)

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `LayerPages.write`."""
        ops.cpu_attn_reshape_and_cache(
            keys, values, *self._halves, slots, self._isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerPages.read`."""
        content = self.memory[pages].flatten(-2).unflatten(-1, (2, -1))
        return tuple(self._in_order(content[..., half, :], order) for half, order in enumerate(self._orders))  # type: ignore[return-value]

    @property
    def _orders(self) -> tuple[Tensor | int, Tensor | int]:
        return self._key_order, self._value_order

    def _in_order(self, content: Tensor, order: Tensor | int) -> Tensor:
        """`[..., N * D]` as `[..., N, D]`."""
        if isinstance(order, int):  # groups of so many tokens, the channels of a group one after the other
            grouped = content.unflatten(-1, (-1, self.dim, order)).transpose(-1, -2)
            ordered: Tensor = grouped.flatten(-3, -2)
            return ordered
        found: Tensor = content[..., order]
        return found

    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerPages.read_slots`."""
        heads = torch.arange(self.memory.shape[1], device=slots.device)[:, None]
        pages = (slots // self.slots)[:, None, None]
        content = self.memory.flatten(-2)
        within, half = slots % self.slots, self.slots * self.dim
        return tuple(  # type: ignore[return-value]
            content[pages, heads, (at * half + self._indices(order)[within])[:, None]]
            for at, order in enumerate(self._orders)
        )

    def _indices(self, order: Tensor | int) -> Tensor:
        """`[N, D]`, where the numbers of a slot stand."""
        if not isinstance(order, int):
            return order
        numbers = torch.arange(self.slots * self.dim)
        return self._in_order(numbers, order)


def _order_of(isa: str, slots: int, dim: int, dtype: torch.dtype) -> tuple[Tensor | int, Tensor | int]:
    """How the kernels order the keys, and the values, of a head in a block: the number of tokens in a group whose
    channels stand one after the other (1 = token by token), or the index `[N, D]` of each number.

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
    orders: list[Tensor | int] = []
    for numbers in found:
        if not torch.equal(numbers.sort().values, torch.arange(count)):
            raise RuntimeError(
                f"paged_eviction: the kernels of vLLM for this processor ({isa}) store {dtype} in a way that is not "
                "known. Start vLLM with --dtype float32."
            )
        index = numbers.argsort().view(slots, dim)
        groups = (index == _grouped(slots, dim, group) for group in (1, 16, 32, slots))
        known = [group for group, same in zip((1, 16, 32, slots), groups, strict=True) if bool(same.all())]
        orders.append(known[0] if known else index)
    return orders[0], orders[1]


def _grouped(slots: int, dim: int, group: int) -> Tensor:
    """`[N, D]` indices where groups of tokens stand channel by channel."""
    if slots % group:
        return torch.full((slots, dim), -1)
    at, channel = torch.arange(slots)[:, None], torch.arange(dim)
    return at // group * group * dim + channel * group + at % group


class CpuBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    """See `EvictingBuilder`."""

    pages = CpuPages


class CpuImpl(EvictingImpl, CPUAttentionBackendImpl):
    """See `EvictingImpl`."""


class CpuBackend(EvictingBackend, CPUAttentionBackend):
    """See `EvictingBackend`."""

    evicting_impl = CpuImpl
    evicting_builder = CpuBuilder

"""`FLASH_ATTN` and `TRITON_ATTN`. Written and type-checked on a machine without a GPU: **never run**."""

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from .backend import EvictingBackend, EvictingBuilder, EvictingImpl
from .settings import latest
from .spec import EvictionSpec


class GpuBackend(EvictingBackend):
    """Blocks by heads, where each head evicts its own tokens."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """See `AttentionBackend`."""
        _, settings = latest()
        if settings is None or not settings.separate:
            return super().supported_kv_cache_layouts()
        return (KVCacheLayout.LBHNC,)


class GpuBuilder(EvictingBuilder):
    """Plans between graphs: a forward of layers that evict is not captured as a whole."""

    heads_named = ("num_heads_q", "num_heads_kv")

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """See `AttentionMetadataBuilder`."""
        if isinstance(kv_cache_spec, EvictionSpec):
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)


class FlashBuilder(GpuBuilder, FlashAttentionMetadataBuilder):
    """See `EvictingBuilder`."""


class FlashImpl(EvictingImpl, FlashAttentionImpl):
    """See `EvictingImpl`."""


class FlashBackend(GpuBackend, FlashAttentionBackend):
    """See `EvictingBackend`."""

    evicting_impl = FlashImpl
    evicting_builder = FlashBuilder


class TritonBuilder(GpuBuilder, TritonAttentionMetadataBuilder):
    """See `EvictingBuilder`."""


class TritonImpl(EvictingImpl, TritonAttentionImpl):
    """See `EvictingImpl`."""


class TritonBackend(GpuBackend, TritonAttentionBackend):
    """See `EvictingBackend`."""

    evicting_impl = TritonImpl
    evicting_builder = TritonBuilder

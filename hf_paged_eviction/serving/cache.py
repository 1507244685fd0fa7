"""transformers' paged cache, of which the full-attention layers evict."""

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.requests import RequestState

from .allocator import BoundedAllocator
from .options import ServingOptions


class BoundedPagedCache(PagedAttentionCache):  # type: ignore[misc]
    """Every request owns at most the pages that its budget needs. Sliding-window layers are transformers' own.

    Made by `bound`, which takes over a cache of transformers: what was made with that one goes on with this one.
    """

    @classmethod
    def bound(cls, cache: PagedAttentionCache, options: ServingOptions) -> None:
        """Turn a cache of transformers into this one. It must not have served any request.

        Raises:
            ValueError: transformers takes other layers for full-attention layers than this package does.
        """
        full = cache.cache_allocators[FullAttentionCacheAllocator.layer_type]
        if set(full.layer_indices) != set(options.layers):
            raise ValueError(
                f"Layers {sorted(options.layers)} of this {cache.config.model_type} model can evict, but continuous "
                f"batching takes {sorted(full.layer_indices)} for full-attention layers. Use PagedEvictionCache with "
                "generate."
            )
        BoundedAllocator.bound(full, options)
        cache.__class__ = cls
        cache.use_prefix_sharing = False
        if cache.read_cache_limit is None:
            cache.read_cache_limit = options.budget
        cache.max_decode_fast_path_length = 0

    @property
    def bounded(self) -> BoundedAllocator:
        """Of the layers that evict."""
        found: BoundedAllocator = self.cache_allocators[BoundedAllocator.layer_type]
        return found

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        """Whether there are pages for these tokens of a request; unless `dry_run`, they are taken."""
        self.bounded.announce(state)
        stored: bool = super().can_store_request_tokens(state, request_len, dry_run)
        return stored

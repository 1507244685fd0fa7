"""Eviction switched on for the continuous batching of one model, and off again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from transformers import PreTrainedModel

from ..cache import PagedEvictionCache
from .contexts import ServedContext
from .contract import check_transformers
from .stats import BatchingStats

_ENTRY = "init_continuous_batching"
_CACHED = "_cached_continuous_batching_manager"


class PagedBatching:
    """What `paged_batching` hands out.

    Attributes:
        options: what was asked for.
    """

    def __init__(self, model: Any, options: Any) -> None:
        self.options = options
        self._model = model
        self._managers: WeakSet[Any] = WeakSet()
        self._latest: Any = None

    def stats(self) -> BatchingStats:
        """What live requests hold, as of the last step, and what has happened since the last manager was made."""
        return BatchingStats() if self._latest is None else self._latest.stats()

    def context(self, cache: PagedEvictionCache) -> ServedContext:
        """A text that was read before, for `manager.add_request(question_ids, context=...)`.

        Requests that begin with it give what `cache` would give alone; its tokens are copied into the pages of each.

        Args:
            cache: of one unpadded row, read or loaded from a file, made with the same budget, policy, `sink_tokens` and
                `recent_tokens`. It must not be used any more. What it protects stays protected.

        Raises:
            ValueError: it cannot be served, with the reason.
        """
        return ServedContext.of(cache, self.options, self._model)

    def init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """A manager that bounds its requests; takes what `model.init_continuous_batching` takes."""
        from .manager import BoundedManager

        model = self._model
        kept = getattr(model, _CACHED, None)
        if isinstance(kept, BoundedManager):
            kept.switch_to_cb_friendly_attn(model, kept.continuous_batching_config.auto_switch_to_flash)
            return kept
        if generation_config is None:
            generation_config = model.generation_config
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1  # as transformers spells "none" here
        self._latest = BoundedManager(
            model, generation_config, continuous_batching_config, workload_hints, self.options
        )
        self._managers.add(self._latest)
        return self._latest

    def close(self, hard: bool = False) -> None:
        """Let all requests come to their end (or fail them, if `hard`), and forget the managers."""
        for manager in list(self._managers):
            manager.close(hard)
        if getattr(self._model, _CACHED, None) in self._managers:
            delattr(self._model, _CACHED)


@contextmanager
def paged_batching(
    model: PreTrainedModel,
    budget: int,
    *,
    prefill_chunk_size: int = 512,
    prefix_cache: str | int | None = "256MiB",
    **options: Any,
) -> Iterator[PagedBatching]:
    """Bound every request of this model's continuous batching to `budget` tokens per layer.

    Inside, `model.generate_batch`, `model.init_continuous_batching` and `model.continuous_batching_context_manager` are
    what they were, with streaming and cancelling, and a request gives the tokens that it would give alone with
    `PagedEvictionCache` and the same `prefill_chunk_size`. Its pages are reserved when it is admitted, so that none is
    ever preempted. Outside, the model is as before. Only this model object is touched.

    A prompt that begins as an earlier one did is not read again up to the last cut that both have, see `Prefixes`;
    `allow_block_sharing=False` in the configuration turns it off. Refused with a reason: CUDA graphs, compiled steps,
    asynchronous batching, block tables, offloading, other schedulers, tensor parallelism.

    Args:
        model: with a language-model head.
        budget: tokens held per request and layer, a multiple of `block_size`.
        prefill_chunk_size: prompts are cut every so many tokens. `max_batch_tokens` must be at least as large.
        prefix_cache: bytes for what prompts have left that may come again; None = nothing is kept.
        **options: `policy`, `allocator`, `heads`, `block_size`, `sink_tokens` and `recent_tokens` of `CacheOptions`; of
            the others only their defaults. The allocator has to know beforehand how the budget is shared out. The block
            has nothing to do with `page_size`, the unit of memory.

    Yields:
        An object whose `stats()` says what live requests hold.

    Raises:
        UnsupportedTransformersError: this release of transformers lacks what serving leans on.
        TypeError, ValueError: options or a model that cannot work, with the way out.
    """
    check_transformers()
    from .options import ServingOptions, refuse_parallel

    if _ENTRY in vars(model):
        raise ValueError("This model is inside a paged_batching already: leave that one first.")
    if getattr(model, _CACHED, None) is not None:
        raise ValueError(
            "This model keeps a continuous batching manager from before, without eviction. Call "
            "model.destroy_cached_continuous_batching_manager() first."
        )
    refuse_parallel(model)
    checked = ServingOptions.check(
        model.config, budget=budget, prefill_chunk_size=prefill_chunk_size, prefix_cache=prefix_cache, **options
    )
    batching = PagedBatching(model, checked)
    # Found by `generate_batch` and by the server on the model itself, before the method of its class.
    setattr(model, _ENTRY, batching.init_continuous_batching)
    hard = True
    try:
        yield batching
        hard = False
    finally:
        delattr(model, _ENTRY)
        batching.close(hard)

"""`paged_batching`: eviction in the continuous batching of one model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from weakref import WeakSet

from transformers import PreTrainedModel

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import unwrapped, without_parallel

from .contexts import ServedContext
from .contract import check_transformers
from .weights import Weights

_ENTRY = "init_continuous_batching"
_CACHED = "_cached_continuous_batching_manager"


class PagedBatching:
    """The object that `paged_batching` yields.

    Attributes:
        options: the checked options.
        used: whether a manager was made.
    """

    def __init__(self, model: Any, options: Any) -> None:
        self.options = options
        self._model = model
        self._managers: WeakSet[Any] = WeakSet()
        self._weights = Weights(model)
        self.used = False

    def context(self, cache: PagedEvictionCache) -> ServedContext:
        """Make a context that requests can continue from: `manager.add_request(question_ids, context=...)`.

        Such a request gives what `cache` would give alone. The tokens are copied into the pages of each request.

        Args:
            cache: one row without pads, read or loaded from a file, with the same budget, policy, `sink_tokens` and
                `recent_tokens`. Do not use it afterwards. Its protected spans stay protected.

        Raises:
            ValueError: the cache cannot be served; the message gives the reason.
        """
        return ServedContext.of(cache, self.options.sizes, self.options.layers, self._model, self._weights.key())

    def forget(self) -> None:
        """Read all prompts anew from now on, and let no request begin with a context that was made before.

        Changes of the weights are noticed, also another adapter. Not noticed is what torch does not count: writes to
        `parameter.data`, also adapters that PEFT merges and takes out between two forwards, and writes to parameters
        that were made in inference mode. Call this after them.
        """
        self._weights.forget()

    def init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """Make a manager that evicts; takes the arguments of `model.init_continuous_batching`."""
        from .manager import BoundedManager

        model = self._model
        manager = getattr(model, _CACHED, None)
        if isinstance(manager, BoundedManager):
            manager.switch_to_cb_friendly_attn(model, manager.continuous_batching_config.auto_switch_to_flash)
            return manager
        config = copy(model.generation_config if generation_config is None else generation_config)
        if config.eos_token_id is None:
            config.eos_token_id = -1  # -1 means none here
        self.used = True
        manager = BoundedManager(model, config, continuous_batching_config, workload_hints, self.options, self._weights)
        self._managers.add(manager)
        return manager

    def close(self, hard: bool = False) -> None:
        """Wait until all requests have ended (or fail them, if `hard`), and drop the managers."""
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
    """Limit every request of a model's continuous batching to `budget` tokens per layer.

    Inside the `with` block `model.generate_batch`, `model.init_continuous_batching` and
    `model.continuous_batching_context_manager` work as before, with streaming and cancelling. A request gives the
    tokens that it gives alone with `PagedEvictionCache` and the same `prefill_chunk_size`. Its pages are reserved when
    it is admitted, so no request is preempted. Only this model object is changed, and restored at the end of the block.

    The beginning of a prompt that an earlier request has read is not read again, up to the last cut that both share
    (see `Prefixes`) and only by the weights and adapters that have read it; `allow_block_sharing=False` in the
    configuration turns this off. Refused, with the reason: CUDA
    graphs, compiled steps, asynchronous batching, block tables, offloading, other schedulers, tensor parallelism.

    Args:
        model: a model with a language-model head, also inside the wrappers of PEFT, `torch.compile` and data
            parallelism.
        budget: number of tokens held per request and layer, a multiple of `block_size`.
        prefill_chunk_size: prompts are cut after every so many tokens. `max_batch_tokens` must be at least as large.
        prefix_cache: bytes for beginnings of prompts that may come again; None = keep none.
        **options: `policy`, `allocator`, `heads`, `bits`, `block_size`, `sink_tokens` and `recent_tokens` of
            `CacheOptions`; other options must have their defaults. The allocator must not depend on the prompt.
            `block_size` is the unit of eviction and independent of `page_size`, the unit of memory.

    Yields:
        A `PagedBatching`.

    Raises:
        UnsupportedTransformersError: this transformers release lacks something that serving uses.
        TypeError, ValueError: the options or the model cannot work; the message says what would.
    """
    check_transformers()
    from .options import ServingOptions

    model = _model_of(model)

    if _ENTRY in vars(model):
        raise ValueError("This model is already inside a paged_batching block. Leave that block first.")
    if getattr(model, _CACHED, None) is not None:
        raise ValueError(
            "This model has a cached continuous batching manager without eviction. Call "
            "model.destroy_cached_continuous_batching_manager() first."
        )
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and mesh.size() > 1:
        raise ValueError(
            f"This model is split over {mesh.size()} processes (tensor parallelism). It is not tested whether all of "
            "them would evict the same tokens in continuous batching. Run one server per device, behind a router."
        )
    checked = ServingOptions(
        model.config, budget=budget, prefill_chunk_size=prefill_chunk_size, prefix_cache=prefix_cache, **options
    )
    batching = PagedBatching(model, checked)
    # Found by `generate_batch` and by the server on the model itself, before the method of its class.
    setattr(model, _ENTRY, batching.init_continuous_batching)
    hard = True
    try:
        yield batching
        hard = False
        if not batching.used:
            warnings.warn(
                "No request of this paged_batching block was bounded: nothing called generate_batch or "
                f"init_continuous_batching of this {type(model).__name__}. Generate with the model that paged_batching "
                "was given; generate() is no continuous batching, it takes a PagedEvictionCache.",
                stacklevel=3,
            )
    finally:
        delattr(model, _ENTRY)
        batching.close(hard)


def _model_of(model: Any) -> PreTrainedModel:
    """The model inside of wrappers, on which calls of `generate_batch` arrive."""
    inside = unwrapped(without_parallel(model))
    inside = getattr(inside, "_orig_mod", inside)  # of torch.compile
    if not isinstance(inside, PreTrainedModel):
        raise TypeError(
            f"paged_batching takes a model of transformers, got {type(model).__name__}. Give it the model inside."
        )
    if not inside.can_generate():
        raise ValueError(
            f"{type(inside).__name__} has no language-model head, so it generates nothing. Give paged_batching the "
            "model around it, such as AutoModelForCausalLM loads."
        )
    return inside

"""transformers' manager of continuous batching, with a budget for every request."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)

from hf_paged_eviction.internals import Implementations

from .allocator import BoundedAllocator
from .attention import IN_PAGES
from .contexts import ServedContext
from .contract import MANAGER, PROCESSOR, check_attributes
from .failures import IsolatedRouter, update_each
from .options import ServingOptions
from .probe import check_takes_pages
from .sampler import Sampler
from .sampling import SamplingProcessor
from .scheduler import FixedCutScheduler
from .weights import Weights


class BoundedManager(ContinuousBatchingManager):  # type: ignore[misc]
    """The manager that `model.init_continuous_batching` returns inside `paged_batching`.

    Args:
        model, generation_config, continuous_batching_config, workload_hints: see `ContinuousBatchingManager`.
        options: budget and policy of each request.
        weights: tells which weights have read what is stored.

    Raises:
        UnsupportedTransformersError: this release of transformers lacks what serving uses.
        ValueError: the configuration has an option that would change answers, or the model's code does not use pages.
    """

    num_return_sequences: int

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        continuous_batching_config: ContinuousBatchingConfig | None,
        workload_hints: Any,
        options: ServingOptions,
        weights: Weights,
    ) -> None:
        self.options, self._weights = options, weights
        self._before: Implementations | None = None
        self._trained = [part for part in model.modules() if part.training]
        self._shares = continuous_batching_config is None or bool(continuous_batching_config.allow_block_sharing)
        config = options.configure(continuous_batching_config, model.device, model.dtype)
        self.model = model
        try:
            super().__init__(model, generation_config, config, workload_hints)
            check_attributes(self, MANAGER)
            check_takes_pages(self.model)
        except BaseException:
            self.restore()
            raise
        # transformers reads a prompt up to its last token, then forks it. Each child reads the prompt itself here, so
        # that it is cut as a request alone is.
        self._children = self.num_return_sequences - 1
        self.num_return_sequences = 1
        self._sampling = SamplingProcessor()
        processors = self.logit_processor
        processors.logits_processor.append(self._sampling)
        processors.supported_keys.update(SamplingProcessor.supported_kwargs)
        processors.tensors_required += 1
        processors.do_processing = True
        self.output_router = IsolatedRouter(self.cancel_request)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Set the attention implementation of the model to the one that reads pages of sets."""
        if self._before is None:
            self._before = Implementations(model)
            model.set_attn_implementation(IN_PAGES)

    def restore(self) -> None:
        """Give each part of the model the attention implementation that it had before, and put those into training mode
        that were in it."""
        if self._before is not None:
            self._before.restore()
            self._before = None
        for part in self._trained:
            part.training = True
        self._trained = []

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop the generation thread, see `ContinuousBatchingManager.stop`, and restore the model."""
        started = self._generation_thread is not None
        try:
            super().stop(*args, **kwargs)
        finally:
            if started and not self.is_running():
                self.restore()

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        *args: Any,
        sampler: Sampler | None = None,
        context: ServedContext | None = None,
        protect: Sequence[tuple[int, int]] | None = None,
        salt: str | None = None,
        budget: int | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Add a request, see `ContinuousBatchingManager.add_request`.

        A request that cannot be served (no tokens, unknown tokens, the id of a live request) fails, with the reason in
        its result; other requests continue.

        Args:
            sampler: chooses the tokens of this request; None = by the `generation_config` of all requests.
            context: context that the request continues from, see `PagedBatching.context`; `input_ids` are the tokens
                after it.
            protect: spans `(start, end)` of `input_ids` that are never evicted, such as those of `spans_of_roles`.
                Spans of the context stay protected, too.
            salt: requests share beginnings of prompts only if their salts are equal. So nobody can learn from the speed
                of a request what others have sent.
            budget: number of tokens held per layer, at most the budget of `paged_batching`; None = that budget.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: a text is not valid Unicode, the spans or the budget are not valid, or the budget is too large,
                or too small for the spans.
        """
        kwargs |= dict(zip(("max_new_tokens", "streaming", "record_timestamps", "eos_token_id"), args, strict=False))
        own = {"sampler": sampler, "context": context, "protect": protect, "salt": salt, "budget": budget}
        _check_arguments(kwargs | own | {"request_id": request_id})
        tokens = [_whole("input_ids", token) for token in input_ids]
        self.options.spans_of(protect, budget, context)
        kwargs |= {name: value for name, value in own.items() if value is not None}
        added: str | None = super().add_request(tokens, request_id, **kwargs)
        for child in range(self._children if added is not None else 0):
            if sampler is not None:
                kwargs["sampler"] = sampler.sibling(child + 1)
            super().add_request(tokens, f"{added}__child#{child}", **kwargs)
        return added

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request, see `ContinuousBatchingManager.cancel_request`. Its handler gets no more results."""
        super().cancel_request(request_id)
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)

    @torch.inference_mode(False)
    def start(self) -> None:
        """Start the generation thread outside of inference mode, see `ContinuousBatchingManager.start`.

        From 5.24 on, transformers' thread inherits the caller's inference mode. A later thread of this manager outside
        of inference mode could not write to the tensors that it makes.
        """
        super().start()

    @torch.inference_mode(False)
    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        check_attributes(processor, PROCESSOR)
        if not isinstance(processor.scheduler, FixedCutScheduler):  # so it was not installed before
            self.options.check_room(self.continuous_batching_config, self.model.dtype)
            bounded = BoundedAllocator(processor.cache, self.options, self._shares, self._weights)
            vocabulary = self.model.get_input_embeddings().num_embeddings
            self._sampling.failure = bounded.failure
            processor.scheduler = FixedCutScheduler(processor.scheduler, bounded, vocabulary, self.output_router)
            processor.offloading_manager.scheduler = processor.scheduler
            update_each(processor)
        return processor

    @property
    def scheduler(self) -> FixedCutScheduler | None:
        """The scheduler of the requests; None before the start and after the end."""
        scheduler = getattr(self.batch_processor, "scheduler", None)
        return scheduler if isinstance(scheduler, FixedCutScheduler) else None

    def close(self, hard: bool) -> None:
        """Wait until all requests have ended (or fail them, if `hard`), and free the memory."""
        if self.is_running():
            self.stop(hard_stop=hard)
        self.restore()  # a manager that never started does not stop
        self.batch_processor = None
        self.destroy()


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of a request of a wrong type, before they reach the thread that generates for all requests."""
    kinds: dict[str, Any] = {"request_id": str, "salt": str, "sampler": Sampler, "context": ServedContext}
    for name, kind in kinds.items():
        value = arguments.get(name)
        if not isinstance(value, kind | None):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}.")
        try:
            _ = value.encode() if isinstance(value, str) else None
        except UnicodeEncodeError:
            raise ValueError(f"{name} is not valid Unicode: {value!r} has a lone surrogate.") from None
    most, ends = arguments.get("max_new_tokens"), arguments.get("eos_token_id")
    _whole("max_new_tokens", 0 if most is None else most)
    for end in ends if isinstance(ends, Sequence | set | frozenset) else () if ends is None else (ends,):
        _whole("eos_token_id", end)


def _whole(name: str, number: Any) -> int:
    try:
        return index(number)
    except TypeError:
        kind = type(number).__name__
        raise TypeError(f"{name} must consist of whole numbers, got {number!r} of the type {kind}.") from None

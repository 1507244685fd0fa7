"""transformers' manager of continuous batching, with a bound for every request."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)

from .allocator import BoundedAllocator
from .attention import IN_PAGES
from .contexts import ServedContext
from .contract import MANAGER, PROCESSOR, check_attributes
from .options import ServingOptions
from .probe import check_takes_pages
from .prompt_logits import PromptLogits
from .sampling import Sampler, SamplingProcessor
from .scheduler import FixedCutScheduler
from .stats import BatchingStats, RequestStats


class BoundedManager(ContinuousBatchingManager):  # type: ignore[misc]
    """What `model.init_continuous_batching` returns inside `paged_batching`.

    Args:
        model, generation_config, continuous_batching_config, workload_hints: see `ContinuousBatchingManager`.
        options: how each request is bounded.

    Raises:
        UnsupportedTransformersError: this release of transformers lacks what serving uses.
        ValueError: the configuration asks for what would change answers, or the model's code does not use pages.
    """

    num_return_sequences: int
    _original_attn_impl: str | None

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        continuous_batching_config: ContinuousBatchingConfig | None,
        workload_hints: Any,
        options: ServingOptions,
    ) -> None:
        self.options = options
        self._last, self._prompt_logits = BatchingStats(), PromptLogits()
        self._shares = continuous_batching_config is None or bool(continuous_batching_config.allow_block_sharing)
        config = options.configure(continuous_batching_config, model.device)
        super().__init__(model, generation_config, config, workload_hints)
        check_attributes(self, MANAGER)
        self._check_model()
        # transformers reads a prompt up to its last token, then forks it. Each child reads the prompt itself here, so
        # that it is cut as a request alone is.
        self._children = self.num_return_sequences - 1
        self.num_return_sequences = 1
        self._offer_sampling()

    def _check_model(self) -> None:
        try:
            check_takes_pages(self.model)
        except ValueError:
            self._restore_attention()
            raise

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Set the model to the attention that reads what each request, layer and KV head holds."""
        original = model.config._attn_implementation
        if original != IN_PAGES:
            model.set_attn_implementation(IN_PAGES)
            self._original_attn_impl = original
        self._prompt_logits.install(model)

    def _restore_attention(self) -> None:
        """Set the model to the attention implementation that it had before this manager was made."""
        if self._original_attn_impl is not None:
            self.model.set_attn_implementation(self._original_attn_impl)
            self._original_attn_impl = None
        self._prompt_logits.remove()

    def _offer_sampling(self) -> None:
        processors = self.logit_processor
        processors.logits_processor.append(SamplingProcessor())
        processors.supported_keys.update(SamplingProcessor.supported_kwargs)
        processors.tensors_required += 1
        processors.do_processing = True

    def add_request(
        self,
        input_ids: list[int],
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

        One that cannot be served (no tokens, unknown ones, the name of a live request) fails with a reason, as its
        result says; the others go on.

        Args:
            sampler: chooses its tokens by what this request asks for; without one they are chosen as the
                `generation_config` of all requests says.
            context: what it goes on from, see `PagedBatching.context`; `input_ids` are the tokens after that.
            protect: spans `(start, end)` of `input_ids` that are never evicted, such as those of `spans_of_roles`; what
                the context protects stays protected, too.
            salt: begins only with what requests with the same one have left, so that nobody learns from its speed what
                others have sent.
            budget: tokens that it holds per layer; at most as many as `paged_batching` was given, which is what it has
                otherwise.

        Raises:
            TypeError, ValueError: these are no spans, or the budget is none, too large, or too small for them.
        """
        optional = {"context": context, "protect": protect, "salt": salt, "budget": budget}
        brought = {name: value for name, value in optional.items() if value is not None}
        self.options.spans(protect, context, budget)
        chosen = {} if sampler is None else {"sampler": sampler}
        added: str | None = super().add_request(input_ids, request_id, *args, **brought, **chosen, **kwargs)
        if added is not None:
            for child in range(self._children):
                chosen = {} if sampler is None else {"sampler": sampler.sibling(child + 1)}
                super().add_request(input_ids, f"{added}__child#{child}", *args, **brought, **chosen, **kwargs)
        return added

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request, see `ContinuousBatchingManager.cancel_request`; its handler hears no more."""
        super().cancel_request(request_id)
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)

    def drop_unheard(self) -> None:
        """Forget results that no handler waits for: where all requests have one, they are of such as were cancelled."""
        results = self.output_router.output_queue
        for _ in range(results.qsize()):
            results.get_nowait()

    @torch.inference_mode(False)
    def start(self) -> None:
        """Start the generation thread, see `ContinuousBatchingManager.start`, whatever the caller's inference mode.

        From 5.24 on transformers' thread takes over the caller's. Tensors that it makes then could not be written to
        by a later thread of this manager outside inference mode.
        """
        super().start()

    @torch.inference_mode(False)
    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        check_attributes(processor, PROCESSOR)
        if not isinstance(processor.scheduler, FixedCutScheduler):  # it was not there before
            self.options.check_room(self.continuous_batching_config)
            bounded = BoundedAllocator.install(processor.cache, self.options, self._shares)
            vocabulary = self.model.get_input_embeddings().num_embeddings
            cut, logits = self.options.prefill_chunk_size, self._prompt_logits
            processor.scheduler = FixedCutScheduler(processor.scheduler, bounded, cut, vocabulary, logits)
            processor.offloading_manager.scheduler = processor.scheduler
        return processor

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop the generation thread, see `ContinuousBatchingManager.stop`."""
        processor = self.batch_processor
        super().stop(*args, **kwargs)
        self._last = _stats(processor) if processor is not None else self._last

    def close(self, hard: bool) -> None:
        """Let all requests come to their end (or fail them, if `hard`), and give up the memory."""
        if self.is_running():
            self.stop(hard_stop=hard)
        self._restore_attention()  # a manager that was never started does not stop
        self._last, self.batch_processor = self.stats(), None
        self.destroy()

    def stats(self) -> BatchingStats:
        """What live requests hold, as of the last step."""
        processor = self.batch_processor
        return self._last if processor is None else _stats(processor)


def _stats(processor: ContinuousBatchProcessor) -> BatchingStats:
    scheduler = processor.scheduler
    if not isinstance(scheduler, FixedCutScheduler):
        return BatchingStats()  # it is being made
    bounded = scheduler.bounded
    # Copied at once, because the generation thread goes on.
    requests = tuple(
        RequestStats(name, request.seen, request.seen - request.evicted, request.evicted, request.pages)
        for name, request in bounded.requests.taken.copy().items()
    )
    return BatchingStats(
        requests,
        waiting=len(scheduler.waiting_requests),
        admitted=bounded.admitted,
        refused=scheduler.refused,
        evicted=bounded.evicted + sum(request.evicted for request in requests),
        pages=bounded.num_blocks,
        pages_in_use=bounded.pages_in_use,
        kept_bytes=bounded.prefixes.bytes,
        shared=bounded.prefixes.hits,
        page_size=bounded.tokens_per_page,
        steps=bounded.steps,
    )

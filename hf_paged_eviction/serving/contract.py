"""What serving leans on in transformers' continuous batching, which is private and moves between releases.

Nothing else in this room names a private part that is not listed here. `moved()` says which of them are no longer what
they were; a release where one has moved is refused, and all others are served.
"""

import inspect
import warnings
from dataclasses import dataclass
from importlib import import_module

import transformers

from ..integration import versions

#: Releases of transformers that the tests of this room were run with.
TESTED = versions.SERVING

_ROOM = "transformers.generation.continuous_batching"


class UnsupportedTransformersError(ImportError):
    """Serving leans on something that the transformers release that is installed has no longer, or not yet."""


def check_transformers() -> None:
    """Refuse releases whose continuous batching is not what this room leans on; warn of those that were not tested.

    Raises:
        UnsupportedTransformersError: with what has moved, and the releases that were tested.
    """
    gone = moved()
    if gone:
        raise UnsupportedTransformersError(
            f"Serving works inside transformers' continuous batching, whose parts move between releases. In "
            f"{transformers.__version__}, which is installed, {'; '.join(gone[:3])}"
            f"{f'; and {len(gone) - 3} more' if len(gone) > 3 else ''}. Tested are {', '.join(TESTED)}: "
            f"pip install transformers=={TESTED[-1]}. (PagedEvictionCache itself works with all releases from "
            f"{versions.OLDEST} on.)"
        )
    if transformers.__version__ not in TESTED:
        warnings.warn(
            f"Serving has not been tested with transformers {transformers.__version__}, but all that it leans on is "
            f"there. Tested are {', '.join(TESTED)}.",
            stacklevel=2,
        )


@dataclass(frozen=True)
class Part:
    """A class of transformers, and what is used of it.

    Attributes:
        module: below `transformers.generation.continuous_batching`, or a full name.
        name: of the class or function; its methods are named in `methods`.
        methods: name -> parameters in order, `self` left out. An empty name stands for a call of `name` itself.
        words: what must stand in the source of the class: names of attributes, and what is called with them.
    """

    module: str
    name: str
    methods: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()

    def moved(self) -> list[str]:
        """What is not as it was, in words."""
        try:
            found = getattr(import_module(self._full_name), self.name)
        except (ImportError, AttributeError) as error:
            return [f"{self._full_name}.{self.name} is gone ({error})"]
        source = inspect.getsource(found)
        gone = [f"{self.name} no longer says {word!r}" for word in self.words if word not in source]
        return gone + [text for method, wanted in self.methods for text in self._moved_method(found, method, wanted)]

    @property
    def _full_name(self) -> str:
        return self.module if self.module.startswith("transformers.") else f"{_ROOM}.{self.module}"

    def _moved_method(self, found: type, method: str, wanted: str) -> list[str]:
        name = f"{self.name}.{method}" if method else self.name
        called = getattr(found, method, None) if method else found
        if called is None:
            return [f"{name} is gone"]
        takes = " ".join(parameter for parameter in inspect.signature(called).parameters if parameter != "self")
        return [] if takes == wanted else [f"{name} takes ({takes}), not ({wanted})"]


PARTS = (
    Part(
        "cache",
        "PagedAttentionCache",
        (
            ("can_store_request_tokens", "state request_len dry_run"),
            ("compute_free_capacity", "relative"),
            ("extend_read_and_write_indices", "request_id past_length query_length read_index write_index"),
            ("update", "key_states value_states layer_idx kwargs"),
            ("free_blocks", "request_id no_cache"),
        ),
        (
            "self.cache_allocators",
            "self.layer_to_allocator",
            "self.pool",
            "self.bytes_per_sector",
            "self.num_sectors",
            "self.cache_tensor",
            "self.max_batch_tokens",
            "self.use_prefix_sharing",
            "self.read_cache_limit",
            "self.max_decode_fast_path_length",
            'kwargs["cu_seq_lens_k"][allocator.layer_type]',
            'kwargs["max_length_k"][allocator.layer_type]',
        ),
    ),
    Part(
        "cache_allocators",
        "FullAttentionCacheAllocator",
        (
            ("", "index config num_key_value_heads cache_dtype page_size layer_indices allow_block_sharing"),
            ("register_cache_tensor", "bytes_per_sector non_trash_bytes cache_tensor pool"),
            ("needs_new_blocks", "request_id past_length query_length"),
            ("allocate_cache_to_request", "request_id past_length query_length"),
            ("free_blocks", "request_id no_cache"),
            ("get_seqlen_k", "past_length query_length"),
            ("fill_block_table", "request_id past_length query_length block_table"),
            ("fork_blocks", "source_request_id dest_request_id past_length"),
        ),
        (
            "self._kv_token_views: dict[int, tuple[torch.Tensor, torch.Tensor]]",
            "flattened_view[(2 * i + 0) * self.tokens_per_page :]",
            "flattened_view[(2 * i + 1) * self.tokens_per_page :]",
            "self.pool.get_free_blocks(self.index, blocks_needed)",
        ),
    ),
    Part(
        "cache_allocators",
        "CachePool",
        (
            ("get_free_blocks", "index num_blocks"),
            ("count_free_blocks", "index"),
            ("free_blocks", "index block_ids"),
        ),
        ("def num_free_sectors",),
    ),
    Part("cache_allocators", "CacheAllocator", words=("self.block_physical_stride", "self.block_table", "layer_type")),
    Part(
        "scheduler",
        "Scheduler",
        (
            ("", "cache safety_margin max_requests_per_batch"),
            ("schedule_batch", "token_budget cache_budget"),
            ("add_waiting_request", "state"),
            ("set_request_cancellation", "request_id"),
            ("clear_cancelled_requests", ""),
            ("_get_waiting_candidates", ""),
            ("_cleanup_waiting_queue", "request_ids_to_remove_from_waiting"),
            ("_try_to_meet_safety_margin", ""),
        ),
        (
            "self.active_requests",
            "self.waiting_requests",
            "self._requests_to_cancel",
            "self._cancellation_lock",
            "self.block_new_requests",
            "self.starved_requests",
            "self.max_requests_per_batch",
            "self.safety_margin",
        ),
    ),
    Part("requests", "FutureRequestState", (("", "state has_new_token complete_blocks query_length"),)),
    Part(
        "requests",
        "RequestState",
        words=(
            "generated_tokens",
            "logit_processor_kwargs",
            "initial_tokens",
            "remaining_prefill_tokens",
            "tokens_to_process",
            "position_offset",
            "max_new_tokens",
            "self._eos_token_ids",
            "current_len >= self._new_tokens_limit",
            "error=self.error",
        ),
    ),
    Part(
        "continuous_api",
        "ContinuousBatchingManager",
        (
            ("", "model generation_config continuous_batching_config workload_hints"),
            ("_create_batch_processor", ""),
            (
                "add_request",
                "input_ids request_id max_new_tokens streaming record_timestamps eos_token_id logit_processor_kwargs",
            ),
            ("cancel_request", "request_id"),
            ("register_result_handler", "request_id callback"),
            ("stop", "block timeout keep_for_next_session hard_stop"),
            ("destroy", ""),
        ),
        (
            "self.continuous_batching_config",
            "self.num_return_sequences",
            "self.batch_processor",
            "self.logit_processor",
        ),
    ),
    Part(
        "continuous_api",
        "ContinuousBatchProcessor",
        (("_handle_request_error", "error state"),),
        (
            "self.scheduler.add_waiting_request(state)",
            "self._handle_request_error(e, state)",
            "self.offloading_manager = ",
        ),
    ),
    Part("offloading_manager", "OffloadingManager", words=("self.scheduler = scheduler", "self.scheduler.")),
    Part(
        "continuous_api",
        "OutputRouter",
        words=("self.result_handlers", "self._lock", "self.output_queue"),
    ),
    Part("continuous_api", "BackgroundThreadStatus", (("can_accept_new_requests", ""),), ("self.fatal_error",)),
    Part(
        "cb_logits_processors",
        "ContinuousBatchingLogitsProcessorList",
        (
            ("check_kwargs", "kwargs"),
            ("prepare_tensor_args", "requests_in_batch arg_storage"),
            ("__call__", "input_ids scores logits_processor_args"),
        ),
        ("self.supported_keys", "self.tensors_required", "self.do_processing", "if request.has_new_token"),
    ),
    Part(
        "cb_logits_processors",
        "ContinuousBatchingLogitsProcessor",
        (
            ("fill_defaults", "int32_tensor"),
            ("prepare_tensor_args", "requests_with_new_token"),
            ("__call__", "scores tensor_arg"),
        ),
    ),
    Part(
        "continuous_api",
        "ContinuousMixin",
        (("init_continuous_batching", "generation_config continuous_batching_config workload_hints"),),
        ("self.init_continuous_batching(", "_cached_continuous_batching_manager"),
    ),
    Part(
        "transformers.generation.configuration_utils",
        "ContinuousBatchingConfig",
        words=(
            "page_size",
            "num_blocks",
            "max_batch_tokens",
            "max_blocks_per_request",
            "allow_block_sharing",
            "use_async_batching",
            "use_cuda_graph",
            "varlen_compile_config",
            "default_compile_level",
            "scheduler_type",
            "safety_margin",
            "cpu_offload_space",
        ),
    ),
)


def moved() -> list[str]:
    """What this room leans on and is no longer there, in words; empty = all is as it was."""
    return [text for part in PARTS for text in part.moved()]

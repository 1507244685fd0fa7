"""The parts of transformers' continuous batching that serving uses. They are private and change between releases.

A release is refused only if a class, method, field or attribute is missing, or if a signature no longer takes the
arguments of a call. Other releases are served; those that were not tested with a warning.
"""

import warnings
from functools import cache
from operator import attrgetter

import transformers

from hf_paged_eviction.internals import in_words, moved_parts

#: Releases of transformers that the tests were run with, oldest first; the Makefile reads this line.
TESTED = ("5.19.0", "5.20.0", "5.21.0", "5.22.0", "5.23.0", "5.24.0")

#: What is called, overridden, read or set of classes, see `hf_paged_eviction/integration/contract.py`; `__init__` is
#: the call of a class.
USED = {
    "cache.PagedAttentionCache": "can_store_request_tokens(state,request_len)",
    "cache_allocators.FullAttentionCacheAllocator": "__init__(index,config,num_key_value_heads,"
    "cache_dtype,page_size,layer_indices,allow_block_sharing) "
    "register_cache_tensor(bytes_per_sector,non_trash_bytes,cache_tensor,pool) "
    "needs_new_blocks(request_id,past_length,query_length) "
    "allocate_cache_to_request(request_id,past_length,query_length) free_blocks(request_id,no_cache) "
    "free_all_requests() get_seqlen_k(past_length,query_length) "
    "get_read_indices(request_id,past_length,query_length) get_write_indices(request_id,past_length,query_length) "
    "update(key_states,value_states,layer_idx,read_index,write_index)",
    "cache_allocators.CachePool": "get_free_blocks(index,num_blocks) count_free_blocks(index) "
    "free_blocks(index,block_ids)",
    "scheduler.FIFOScheduler": "__init__(cache,safety_margin,max_requests_per_batch) "
    "schedule_batch(token_budget,cache_budget) add_waiting_request(state) set_request_cancellation(request_id) "
    "clear_cancelled_requests() _get_waiting_candidates() _cleanup_waiting_queue(request_ids_to_remove_from_waiting) "
    "_try_to_meet_safety_margin()",
    "requests.FutureRequestState": "__init__(state,has_new_token,complete_blocks,query_length)",
    "continuous_api.ContinuousBatchingManager": ""
    "__init__(model,generation_config,continuous_batching_config,workload_hints) _create_batch_processor() "
    "add_request(input_ids,request_id,max_new_tokens,streaming,record_timestamps,eos_token_id) "
    "cancel_request(request_id) register_result_handler(request_id,callback) "
    "switch_to_cb_friendly_attn(model,auto_switch_to_flash) stop(block,timeout,keep_for_next_session,hard_stop) "
    "destroy()",
    "continuous_api.ContinuousBatchProcessor": "update_batch()",
    "input_outputs.ContinuousBatchingIOs": "prepare_batch_update()",
    "continuous_api.OutputRouter": "__init__() deliver(output) deliver_batch(outputs) fail_and_deliver(state,error)",
    "continuous_api.ContinuousMixin": ""
    "init_continuous_batching(generation_config,continuous_batching_config,workload_hints)",
    "continuous_api.BackgroundThreadStatus": "can_accept_new_requests()",
    "cb_logits_processors.ContinuousBatchingLogitsProcessorList": "check_kwargs(kwargs)",
    "cb_logits_processors.ContinuousBatchingLogitsProcessor": "fill_defaults(int32_tensor) "
    "prepare_tensor_args(requests_with_new_token) __call__(scores,tensor_arg)",
    "requests.RequestState": "request_id generated_tokens initial_tokens logit_processor_kwargs max_new_tokens "
    "position_offset remaining_prefill_tokens status tokens_to_process _eos_token_ids _new_tokens_limit error",
    "requests.GenerationOutput": "request_id error status",
    "continuous_api.ContinuousBatchingConfig": "allow_block_sharing cpu_offload_space decode_compile_config "
    "default_compile_level kv_padding_interval_size max_batch_tokens max_blocks_per_request max_memory_percent "
    "max_requests_per_batch num_blocks page_size q_padding_interval_size safety_margin scheduler_type "
    "use_async_batching use_cuda_graph varlen_compile_config",
}

#: Attributes of objects, looked for when these are made.
MANAGER = (
    "batch_processor continuous_batching_config num_return_sequences logit_processor.do_processing "
    "logit_processor.logits_processor logit_processor.supported_keys logit_processor.tensors_required "
    "output_router._lock output_router.output_queue output_router.result_handlers background_thread_status.fatal_error "
    "_generation_thread"
)
PROCESSOR = (
    "cache.bytes_per_sector cache.cache_allocators cache.cache_tensor cache.layer_to_allocator "
    "cache.max_decode_fast_path_length cache.num_sectors cache.pool.num_free_sectors cache.read_cache_limit "
    "cache.use_prefix_sharing offloading_manager.scheduler scheduler._cancellation_lock scheduler._requests_to_cancel "
    "scheduler.active_requests scheduler.max_requests_per_batch scheduler.safety_margin scheduler.waiting_requests"
)
ALLOCATOR = (
    "_kv_token_views block_physical_stride block_table blocks_per_sector layer_indices num_blocks tokens_per_page"
)


class UnsupportedTransformersError(ImportError):
    """The installed transformers release lacks something that serving uses."""


def check_transformers() -> None:
    """Refuse releases that lack something serving uses. Warn once about releases that were not tested.

    Raises:
        UnsupportedTransformersError: with what has moved, and the releases that were tested.
    """
    _refuse_moved(moved())
    if transformers.__version__ not in TESTED:
        _warn_untested()


@cache
def _warn_untested() -> None:
    warnings.warn(
        f"Serving has not been tested with transformers {transformers.__version__}. Tested releases: "
        f"{', '.join(TESTED)}.",
        stacklevel=4,
    )


def _refuse_moved(changes: list[str]) -> None:
    if not changes:
        return
    raise UnsupportedTransformersError(
        f"Serving uses private parts of transformers' continuous batching, which change between releases. In the "
        f"installed release {transformers.__version__} {in_words(changes)}. Tested releases: "
        f"{', '.join(TESTED)}; pip install transformers=={TESTED[-1]}. (PagedEvictionCache itself works with "
        "this one.)"
    )


def moved() -> list[str]:
    """Descriptions of what serving uses and the installed transformers release lacks; empty if nothing is missing."""
    return moved_parts("transformers.generation.continuous_batching", USED)


def check_attributes(owner: object, paths: str) -> None:
    """Refuse an object of transformers that lacks one of these attributes, or attributes of attributes.

    Raises:
        UnsupportedTransformersError: with what has moved, and the releases that were tested.
    """
    gone = []
    for path in paths.split():
        try:
            attrgetter(path)(owner)
        except AttributeError:
            gone.append(f"{type(owner).__name__}.{path} is gone")
    _refuse_moved(gone)

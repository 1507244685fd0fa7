"""The parts of vLLM that this package stands on. Some are private and change between releases.

A release is refused only if a class, method, field or parameter is missing. Other releases are served; those that were
not tested, with a line in the log.
"""

import logging
from functools import cache

from hf_paged_eviction.internals import in_words, moved_parts

logger = logging.getLogger("vllm.paged_eviction")

#: Releases of vLLM that the tests were run with.
TESTED = ("0.32",)

#: What is called, overridden or read: members of classes and modules, methods with the parameters that they must have.
USED = {
    "v1.kv_cache_spec_registry.KVCacheSpecRegistry": "_ensure_registered "
    "register(kvcache_spec_cls,manager_class,uniform_type_base_spec,...)",
    "v1.attention.backend.AttentionBackend": "customize_spec(spec,...) get_impl_cls get_builder_cls",
    "v1.attention.backend.AttentionMetadataBuilder": "__init__(kv_cache_spec,layer_names,vllm_config,device,...) "
    "build(common_prefix_len,common_attn_metadata,fast_build,...)",
    "v1.core.single_type_kv_cache_manager.FullAttentionManager": "__init__(kv_cache_spec,block_pool,enable_caching,"
    "...) get_num_blocks_to_allocate(request_id,num_tokens,total_computed_tokens,apply_admission_cap,...) "
    "find_longest_cache_hit(kv_cache_group_ids,...) cache_blocks(request,num_tokens,...) "
    "pop_blocks_for_free(request_id,...) "
    "remove_skipped_blocks(request_id,processed_computed_tokens,...) "
    "_remove_blocks_in_range(request_id,first_block,last_block,...)",
    "v1.kv_cache_interface.FullAttentionSpec": "merge(specs,...) max_memory_usage_bytes(vllm_config,...) "
    "is_uniform_with_collection(kv_cache_specs,...) block_size num_kv_heads head_size head_size_v dtype sliding_window "
    "prefix_cacheable",
    "v1.core.sched.scheduler.Scheduler": "_update_request_as_session(session,update)",
    "v1.sample.logits_processor.interface.LogitsProcessor": "update_state(batch_update,...) validate_params",
    "v1.attention.backend.CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens num_reqs "
    "num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping seq_lens_cpu_upper_bound req_idx",
    "config.VllmConfig": "additional_config cache_config compilation_config kv_transfer_config model_config "
    "parallel_config scheduler_config speculative_config",
    "v1.attention.backends.registry": "register_backend(backend,class_path,...)",
    "v1.sample.logits_processor.builtin": "process_dict_updates(req_entries,batch_update,new_state,...)",
}

#: What snapshots use beyond that. A release that lacks any of it is served without them.
USED_BY_SNAPSHOTS = {
    "v1.core.single_type_kv_cache_manager.FullAttentionManager": "add_local_computed_blocks(request_id,"
    "new_computed_blocks,num_local_computed_tokens,...) take_pending_cow_copies _get_num_evictable_blocks(blocks)",
    "v1.core.sched.scheduler.Scheduler": "_mamba_block_aligned_split(request,num_new_tokens,...) "
    "_preempt_request(request,timestamp,drop_stale_output) pause_state",
    "v1.core.block_pool.BlockPool": "__init__(num_gpu_blocks,enable_caching,hash_block_size,...) "
    "_insert_block_hash(block_hash_with_group_id,block,num_tokens) touch(blocks) get_new_blocks(num_blocks)",
    "v1.core.kv_cache_utils.KVCacheBlock": "block_id block_hash ref_cnt is_null",
    "v1.core.kv_cache_utils": "make_block_hash_with_group_id(block_hash,group_id)",
    "v1.request.Request": "is_finished update_block_hashes get_skip_reading_prefix_cache",
    "v1.worker.utils": "copy_kv_cache_blocks_inplace",
}


class UnsupportedVllmError(ImportError):
    """The installed vLLM release lacks something that this package uses."""


@cache
def check_vllm() -> None:
    """Refuse releases that lack something. Say once which ones were tested.

    Raises:
        UnsupportedVllmError: with what is missing, and the releases that were tested.
    """
    from vllm import __version__

    missing = moved()
    if missing:
        raise UnsupportedVllmError(
            f"paged_eviction uses parts of vLLM that change between releases. In the installed release {__version__} "
            f"{in_words(missing)}. Tested releases: "
            f"{', '.join(TESTED)}. Install one of these, or start vLLM without the setting paged_eviction."
        )
    if not any(__version__ == tested or __version__.startswith(tested + ".") for tested in TESTED):
        logger.warning(
            "paged_eviction was not tested with vLLM %s. Tested releases: %s.", __version__, ", ".join(TESTED)
        )


def moved() -> list[str]:
    """Descriptions of what the installed vLLM lacks; empty if nothing is missing."""
    return moved_parts("vllm", USED)


@cache
def without_snapshots() -> str | None:
    """Why the installed vLLM is served without snapshots; None = it is served with them."""
    missing = moved_parts("vllm", USED_BY_SNAPSHOTS)
    return in_words(missing) if missing else None

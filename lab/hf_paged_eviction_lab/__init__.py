"""Published ways with a KV cache that work here and did not pay, as plug-ins of hf_paged_eviction."""

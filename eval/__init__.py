"""The evaluation harness of hf_paged_eviction: what a policy and a budget cost, in accuracy and perplexity."""

"""The attention implementation "paged_eviction", and the statistics of queries."""

"""Policies that decide by queries or attention: with the attention implementation "paged_eviction"."""

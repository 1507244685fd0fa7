"""Whole procedures that use the cache: verify a model or a policy, fit a score, compress by a probe."""

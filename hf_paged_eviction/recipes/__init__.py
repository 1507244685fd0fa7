"""Procedures that use the cache: verify a model, fit a score, ask questions, compress by a probe."""

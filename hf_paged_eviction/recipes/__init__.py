"""Whole procedures over caches: compress by a probe, fit a score, serve an encoder-decoder model."""

"""Whole procedures: compress by a probe, fit a score, serve an encoder-decoder model, remember a conversation."""

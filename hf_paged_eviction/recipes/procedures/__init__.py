"""Compress by a probe, and serve an encoder-decoder model."""

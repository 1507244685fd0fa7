"""Ask questions about a context, compress by a probe, and serve an encoder-decoder model."""

"""Encoder-decoder models: page the decoder's self-attention, leave the cross-attention whole."""

from typing import Any

from transformers import DynamicCache, EncoderDecoderCache

from ...cache import PagedEvictionCache
from ...options.checked import check_config


def paged_encoder_decoder_cache(config: Any, **settings: Any) -> EncoderDecoderCache:
    """A cache for `generate` of an encoder-decoder model such as BART or Whisper.

    Cross-attention keys belong to the encoder's output and never grow, so they are kept whole.

    Args:
        config: `model.config`.
        **settings: as for `PagedEvictionCache` (`budget`, `block_size`, `policy`, ...).

    Raises:
        ValueError: the model is no encoder-decoder, or its attention depends on the slot (the T5 family).
        TypeError, ValueError: as `PagedEvictionCache`.
    """
    check_config(config)
    if not config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is no encoder-decoder model: use PagedEvictionCache itself.")
    decoder = PagedEvictionCache.of_decoder(config, **settings)
    return EncoderDecoderCache(decoder, DynamicCache())

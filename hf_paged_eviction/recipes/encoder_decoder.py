"""Encoder-decoder models: page the decoder's self-attention, leave the cross-attention whole."""

from typing import Any

from transformers import DynamicCache, EncoderDecoderCache

from ..cache import PagedEvictionCache
from ..options.checked import check_config


def paged_encoder_decoder_cache(config: Any, **settings: Any) -> EncoderDecoderCache:
    """Make a cache for an encoder-decoder model, such as BART or Whisper.

    The keys of cross-attention belong to the output of the encoder and never grow, so all of them are kept.

    Args:
        config: `model.config`.
        **settings: options of `PagedEvictionCache` (`budget`, `block_size`, `policy`, ...).

    Raises:
        ValueError: the model is not an encoder-decoder, or its attention depends on the slot of a key (the T5 family).
        TypeError, ValueError: as for `PagedEvictionCache`.
    """
    check_config(config)
    if not config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is not an encoder-decoder model: use PagedEvictionCache.")
    decoder = PagedEvictionCache.of_decoder(config, **settings)
    return EncoderDecoderCache(decoder, DynamicCache())

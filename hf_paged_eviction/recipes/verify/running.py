"""Feeds texts to a model and its cache."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from ...cache import PagedEvictionCache
from ...integration.cache_argument import cache_argument, cache_kwargs, unwrapped
from ..procedures.encoder_decoder import paged_encoder_decoder_cache
from .model_state import NotCovered
from .rounding import coarse
from .text import Calls, Text, embeddings

#: Logits are compared for so many ids at least, evenly spread over the vocabulary.
_IDS = 2048


class Feeder:
    """One model, and how it wants to be called.

    Attributes:
        encodes: it is an encoder-decoder model; the text is the decoder's, whatever its mask says.
        dtype: of its weights.
        rounds_coarsely: they are in half precision.

    Args:
        model: a causal language model, also one that reads images beside text, or an encoder-decoder model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.encodes: bool = model.config.is_encoder_decoder
        self.dtype: torch.dtype = embeddings(model).dtype
        self.rounds_coarsely = coarse(self.dtype)
        inner = unwrapped(model)
        takes = inspect.signature(inner.forward).parameters
        self._takes_positions, self._takes_cache = "position_ids" in takes, cache_argument(inner.forward) is not None

    def feed(self, text: Text, cache: Any, calls: Calls, after: Callable[[int, int], None] | None = None) -> Tensor:
        """Logits `[rows, columns, some of the vocabulary]`, float32, of all columns fed.

        Args:
            after: told of each forward's columns when it is through.

        Raises:
            NotCovered: the model takes no such cache, or does not return logits of all tokens.
        """
        if not self._takes_cache:
            raise NotCovered("the model takes no cache")
        encoded = self._encode(text) if self.encodes else None
        found = []
        for start, stop in calls:
            given = self._arguments(text, start, stop, encoded) | cache_kwargs(self.model, cache)
            output = self.model(**given, use_cache=True)
            logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
            if logits.shape[1] != stop - start:
                raise NotCovered(f"the model returns logits of {logits.shape[1]} of {stop - start} tokens")
            found.append(logits[..., :: max(logits.shape[-1] // _IDS, 1)].float())
            if after is not None:
                after(start, stop)
        return torch.cat(found, dim=1)

    def _arguments(self, text: Text, start: int, stop: int, encoded: Any) -> dict[str, Any]:
        ids = text.ids[:, start:stop]
        if encoded is not None:
            return {"encoder_outputs": encoded, "decoder_input_ids": ids}
        given = {"input_ids": ids, "attention_mask": text.mask[:, :stop]}
        if self._takes_positions:
            given["position_ids"] = text.positions[:, start:stop]
        return given

    def _encode(self, text: Text) -> Any:
        """What the encoder makes of a short text of each row; its pads do not matter here."""
        try:
            return self.model.get_encoder()(input_ids=text.ids[:, -9:])
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise NotCovered(f"the encoder does not read token ids alone: {error}") from error

    def dynamic(self) -> tuple[Any, DynamicCache]:
        """What transformers would use, and the part of it that belongs to the decoder's own tokens."""
        config = self.model.config
        if not self.encodes:
            cache = DynamicCache(config=config)
            return cache, cache
        text = config.get_text_config(decoder=True)
        pair = EncoderDecoderCache(DynamicCache(config=text), DynamicCache())
        return pair, pair.self_attention_cache

    def paged(self, **settings: Any) -> tuple[Any, PagedEvictionCache]:
        """The same for the cache that is looked at. Raises what its constructor raises."""
        if not self.encodes:
            cache = PagedEvictionCache(self.model.config, **settings)
            return cache, cache
        pair = paged_encoder_decoder_cache(self.model.config, **settings)
        return pair, pair.self_attention_cache

"""What few bits change in the predictions of this very model."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...cache import PagedEvictionCache
from ...integration.cache_argument import cache_kwargs
from ...precision.coded import CodedStore

#: Tokens of a random text, and of each forward: what earlier forwards held is read rounded.
_TOKENS, _CHUNK = 96, 32
BITS = (8, 4, 3, 2)
#: Of the bits at which layers are looked at one by one, and at which a model is said to be ruined.
_LOOKED_AT = 4
#: Nats. A model that 4 bits change so much more than others is one that they ruin.
_MUCH = 0.1
#: Layers that are named.
_NAMED = 3


@dataclass(frozen=True)
class FewBits:
    """Mean Kullback-Leibler divergence of the full cache's predictions from those of a cache that holds every token in
    few bits, on random tokens or on a text.

    Attributes:
        nats: by bits; empty where it was not measured.
        reason: why not.
        layers: by layer, of that layer alone in 4 bits; where a text was given, or 4 bits change much.
        text: whether a text was given.
    """

    nats: dict[int, float]
    reason: str = ""
    layers: dict[int, float] = field(default_factory=dict)
    text: bool = False

    def __str__(self) -> str:
        if self.reason:
            return f"What few bits cost was not measured: {self.reason}"
        said = ", ".join(f"{nats:.1e} at {bits} bits" for bits, nats in self.nats.items())
        advice = " (much: keep 8 bits, or none)" if self.nats[_LOOKED_AT] > _MUCH else ""
        worst = sorted(self.layers, key=lambda layer: -self.layers[layer])[:_NAMED]
        named = ", ".join(f"{self.layers[layer]:.1e} in layer {layer}" for layer in worst)
        alone = f"; one layer alone at {_LOOKED_AT} bits at most {named}" if named else ""
        return f"What few bits cost, nats per {'' if self.text else 'random '}token: {said}{advice}{alone}"


@torch.no_grad()
def look_at_bits(model: Any, seed: int = 0, text: Tensor | None = None) -> FewBits:
    """Read a text in forwards of 32 tokens, with all tokens as they came and in few bits.

    Args:
        text: `[1, n]` int64, more than 32 tokens; None = 96 random ones.
    """
    if model.config.is_encoder_decoder:
        return FewBits({}, "an encoder-decoder model")
    weight = model.get_input_embeddings().weight
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(weight) // 4, len(weight) // 2 + 1, (1, _TOKENS), generator=draw) if text is None else text
    ids = ids.to(weight.device)
    try:
        full = _said(model, ids, DynamicCache(config=model.config))
        found = {bits: _divergence(full, _said(model, ids, _held(model, ids, bits))) for bits in BITS}
        layers = {}
        if text is not None or found[_LOOKED_AT] > _MUCH:
            for layer, _ in _held(model, ids, _LOOKED_AT).paged_layers:
                layers[layer] = _divergence(full, _said(model, ids, _held(model, ids, _LOOKED_AT, layer)))
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        # The first line of our own refusals is the reason.
        return FewBits({}, f"{type(problem).__name__}: {problem}")
    return FewBits(found, layers=layers, text=text is not None)


def _held(model: Any, ids: Tensor, bits: int, alone: int | None = None) -> PagedEvictionCache:
    """A cache that holds all of it, in few bits: in all layers, or in one."""
    budget = -(-ids.shape[1] // 4) * 4
    cache = PagedEvictionCache(model.config, budget=budget, block_size=4, bits=bits)
    for index, layer in cache.paged_layers:
        if alone not in (None, index) and isinstance(layer.store, CodedStore):
            layer.store.round_nothing()
    return cache


def _said(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Log-probabilities of all but the first forward."""
    given = cache_kwargs(model, cache)
    found = [model(input_ids=part, use_cache=True, **given).logits for part in ids.split(_CHUNK, dim=1)]
    return torch.cat(found[1:], dim=1).float().log_softmax(-1)


def _divergence(expected: Tensor, found: Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(-1).mean().clamp_min(0))

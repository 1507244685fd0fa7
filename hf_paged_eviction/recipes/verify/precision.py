"""What few bits change in the predictions of this very model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...cache import PagedEvictionCache

#: Tokens of the text, and of each forward: what earlier forwards held is read rounded.
_TOKENS, _CHUNK = 96, 32
BITS = (8, 4, 3, 2)
#: Nats. A model that 4 bits change so much more than others is one that they ruin.
_MUCH = 0.1


@dataclass(frozen=True)
class FewBits:
    """Mean Kullback-Leibler divergence of the full cache's predictions from those of a cache that holds every token in
    few bits, on random tokens.

    Attributes:
        nats: by bits; empty where it was not measured.
        reason: why not.
    """

    nats: dict[int, float]
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"What few bits cost was not measured: {self.reason}"
        said = ", ".join(f"{nats:.1e} at {bits} bits" for bits, nats in self.nats.items())
        advice = " (much: keep 8 bits, or none)" if self.nats[4] > _MUCH else ""
        return f"What few bits cost, nats per random token: {said}{advice}"


@torch.no_grad()
def look_at_bits(model: Any, seed: int = 0) -> FewBits:
    """Read a random text in three forwards, with all tokens as they came and in few bits."""
    if model.config.is_encoder_decoder:
        return FewBits({}, "an encoder-decoder model")
    weight = model.get_input_embeddings().weight
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(weight) // 4, len(weight) // 2 + 1, (1, _TOKENS), generator=draw).to(weight.device)
    try:
        caches = [PagedEvictionCache(model.config, budget=_TOKENS, block_size=4, bits=bits) for bits in BITS]
        full = _said(model, ids, DynamicCache(config=model.config))
        found = {bits: _divergence(full, _said(model, ids, cache)) for bits, cache in zip(BITS, caches, strict=True)}
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        # The first line of our own refusals is the reason.
        return FewBits({}, f"{type(problem).__name__}: {problem}")
    return FewBits(found)


def _said(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Log-probabilities of all but the first forward."""
    found = [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in ids.split(_CHUNK, dim=1)]
    return torch.cat(found[1:], dim=1).float().log_softmax(-1)


def _divergence(expected: Tensor, found: Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(-1).mean().clamp_min(0))

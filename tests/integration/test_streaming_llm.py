"""The published StreamingLLM (arXiv 2309.17453), written straight from the paper for a llama, and this cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

import models
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

SINKS, WINDOW = 4, 20


def rotated(model: Any, states: Tensor, positions: Tensor) -> Tensor:
    """`[heads, tokens, dim]` at positions `[tokens]`."""
    cos, sin = model.model.rotary_emb(states[None], positions[None])
    half = states.shape[-1] // 2
    swapped = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * cos[0] + swapped * sin[0]


@torch.no_grad()
def published(model: Any, ids: Tensor) -> Tensor:
    """Logits `[tokens, vocabulary]`, token by token: keys are cached before their rotation; the first four tokens and
    the newest stay; positions are those within the cache."""
    held: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.model.layers]
    logits = []
    for token in ids:
        hidden = model.model.embed_tokens(token[None])
        for layer, cache in zip(model.model.layers, held, strict=True):
            normed, attention = layer.input_layernorm(hidden), layer.self_attn
            query, key, value = (
                projection(normed).view(-1, attention.head_dim)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            cache.append((key, value))
            if len(cache) > SINKS + WINDOW:
                del cache[SINKS]
            keys = torch.stack([key for key, _ in cache], dim=1)  # [kv heads, tokens, dim]
            values = torch.stack([value for _, value in cache], dim=1)
            places = torch.arange(len(cache))
            group = len(query) // len(keys)
            keys = rotated(model, keys, places).repeat_interleave(group, 0)
            query = rotated(model, query[:, None], places[-1:])
            weights = (query @ keys.mT * attention.scaling).softmax(-1)
            seen = weights @ values.repeat_interleave(group, 0)
            hidden = hidden + attention.o_proj(seen.reshape(1, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits.append(model.lm_head(model.model.norm(hidden))[0])
    return torch.stack(logits)


@torch.no_grad()
def ours(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, PagedEvictionCache]:
    settings = {"budget": SINKS + WINDOW, "policy": "streaming_llm", "sink_tokens": SINKS, "positions": "cache"}
    cache = PagedEvictionCache(model.config, **{**settings, **options})
    logits = [
        model(ids[None, at : at + 1], position_ids=torch.tensor([[at]]), **{CACHE_ARGUMENT: cache}).logits[0, -1]
        for at in range(len(ids))
    ]
    return torch.stack(logits), cache


def test_is_what_was_published() -> None:
    model, ids = models.shared("llama"), models.prompts([150], seed=8)[0]
    expected = published(model, ids)
    logits, cache = ours(model, ids, block_size=1)
    assert_close(logits, expected)
    text, _ = ours(model, ids, block_size=1, positions="text")
    assert (text - expected).abs().max() > 0.1  # without it something else is said
    assert sorted(cache.layers[0].positions[0, 0].tolist()) == [*range(SINKS), *range(150 - WINDOW, 150)]


@pytest.mark.parametrize("block_size", [2, 4])
def test_larger_blocks_hold_the_same_tokens(block_size: int) -> None:
    """Gaps are closed once per block: the sinks stand up to a block further away."""
    model, ids = models.shared("llama"), models.prompts([151], seed=8)[0]
    _, cache = ours(model, ids, block_size=block_size)
    positions, shifts = cache.layers[0].positions[0, 0], cache.layers[0].shifts[0, 0]
    assert sorted(positions.tolist()) == [*range(SINKS), *range(151 - WINDOW, 151)]
    exact = 151 - SINKS - WINDOW
    for position, shift in zip(positions.tolist(), shifts.tolist(), strict=True):
        assert shift == 0 if position >= SINKS else exact - block_size < shift <= exact

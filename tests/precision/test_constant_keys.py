"""Keys with a large constant part (Qwen2's biases), planted without changing what the model computes."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.precision.codec import Codec
from hf_paged_eviction.precision.few_bits import FewBits

CONSTANT, TOKENS, FIRST = 300.0, 120, 40


@functools.cache
def shared() -> tuple[Any, Any]:
    """A tiny Qwen2 whose queries have nothing in one pair of channels, and the same with a large constant there in
    every key. The pair is the fastest: the constant turns by a radian per token."""
    plain = models.build("qwen2").double()
    dim = plain.model.layers[0].self_attn.head_dim
    for layer in plain.model.layers:
        queries = layer.self_attn.q_proj
        with torch.no_grad():
            for channel in (0, dim // 2):
                queries.weight.view(-1, dim, queries.in_features)[:, channel] = 0
                queries.bias.view(-1, dim)[:, channel] = 0
    planted = copy.deepcopy(plain)
    for layer in planted.model.layers:
        with torch.no_grad():
            layer.self_attn.k_proj.bias.view(-1, dim)[:, 0] += CONSTANT
    return plain, planted


def says(model: Any, bits: int | None, pads: int, centred: bool = True) -> Tensor:
    """Log-probabilities of a row, read in chunks, all of it held in so many bits; beside it a row without pads."""
    ids = torch.stack(models.prompts([TOKENS, TOKENS], seed=3))
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    cache = PagedEvictionCache(model.config, budget=TOKENS, block_size=4, bits=bits, attention_mask=mask)
    for _, layer in cache.paged_layers:
        if not centred and isinstance(layer.store.coder, FewBits):
            layer.store.coder.codecs = Codec(bits, turned=True), Codec(bits, turned=True)
    logits, at = [], (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for start in range(0, TOKENS, FIRST):
            part = slice(start, start + FIRST)
            logits.append(
                model(
                    ids[:, part],
                    attention_mask=mask[:, : start + FIRST],
                    position_ids=at[:, part],
                    **{CACHE_ARGUMENT: cache},
                ).logits[0]
            )
    return torch.cat(logits)[FIRST:].log_softmax(-1)


def divergence(expected: Tensor, observed: Tensor) -> float:
    """Mean Kullback-Leibler divergence in nats."""
    return (expected.exp() * (expected - observed)).sum(-1).mean().item()


@pytest.mark.parametrize("pads", [0, 23])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_constant_costs_nothing(bits: int, pads: int) -> None:
    plain, planted = shared()
    full = says(plain, None, pads)
    assert (says(planted, None, pads) - full).abs().max() < 1e-6, "planting changes nothing"
    here, there, as_they_are = (
        divergence(full, rounded)
        for rounded in (says(plain, bits, pads), says(planted, bits, pads), says(planted, bits, pads, centred=False))
    )
    assert there < 1.5 * here, "nothing that could be told from rounding itself"
    assert as_they_are > 20 * here

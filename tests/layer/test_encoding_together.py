"""Layers of a static cache make the codes of a block at once: the same codes, in fewer operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
from counted import Operators
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.layer.scores import encode_together
from hf_paged_eviction.precision.coded import CodedStore


def waiting(layers: int, **settings: Any) -> PagedEvictionCache:
    """A cache whose layers hold other tokens each, five of which have no codes yet; one row has pads."""
    model = models.build("llama", num_hidden_layers=layers)
    ids, mask = models.left_pad(models.prompts([40, 25], seed=3))
    settings = {"policy": "keydiff", "budget": 24, "block_size": 8, "bits": 4, **settings}
    cache = PagedEvictionCache(model.config, attention_mask=mask, **settings)
    generator = torch.Generator().manual_seed(0)
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    for count in (40, *[1] * 5):
        cache.get_mask_sizes(count, 0)
        for layer in range(layers):
            keys, values = (torch.randn(len(ids), heads, count, dim, generator=generator) for _ in range(2))
            cache.update(keys, values, layer)
    return cache


def codes(cache: PagedEvictionCache) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = []
    for _, layer in cache.paged_layers:
        assert isinstance(layer.store, CodedStore) and layer.store.uncoded == 0
        parts += [*layer.store.tensors, *layer.store.exact.tensors(), layer.table.scores]
    return parts


@pytest.mark.parametrize(
    "settings", [{}, {"policy": "keydiff", "heads": "separate"}, {"policy": "paged_eviction"}], ids=str
)
def test_codes_are_the_same(settings: dict[str, Any]) -> None:
    alone, together = waiting(3, **settings), waiting(3, **settings)
    for _, layer in alone.paged_layers:
        layer.scores.encode()
    encode_together([layer.scores for _, layer in together.paged_layers])
    for ours, expected in zip(codes(together), codes(alone), strict=True):
        assert torch.equal(ours, expected)


def test_more_layers_take_few_operators_more() -> None:
    counts = []
    for layers in (1, 2, 3):
        cache = waiting(layers)
        with Operators() as operators:
            encode_together([layer.scores for _, layer in cache.paged_layers])
        counts.append(operators.count)
    first, second, third = counts
    assert third - second < 0.6 * first

"""A few key channels that are far larger than the others, planted without changing what the model computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.store.codec import Codec
from hf_paged_eviction.store.coded import CodedStore
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import make_samples

FACTOR, PAIRS, ASKED = 24.0, (1, 6), 32


def with_outliers(model: Any) -> Any:
    """Scale pairs of key channels that the rotary embedding mixes, and divide the query by the same."""
    planted = copy.deepcopy(model)
    dim, half = model.config.head_dim, model.config.head_dim // 2
    scale = torch.ones(dim)
    for pair in PAIRS:
        scale[pair] = scale[pair + half] = FACTOR
    with torch.no_grad():
        for layer in planted.model.layers:
            keys, queries = layer.self_attn.k_proj, layer.self_attn.q_proj
            for each, change in ((keys, scale), (queries, 1 / scale)):
                by_channel = change.repeat(each.out_features // dim)
                each.weight.mul_(by_channel[:, None])
                each.bias.mul_(by_channel)
    return planted


def says(model: Any, ids: Tensor, bits: int | None, turned: bool = True) -> Tensor:
    """Log-probabilities of the last tokens, after a prompt that is held in full, in so many bits."""
    cache = PagedEvictionCache(model.config, budget=ids.shape[1], bits=bits)
    for _, layer in cache.paged_layers:
        if not turned and isinstance(layer.store, CodedStore):
            layer.store._codecs = Codec(bits), Codec(bits)
    with torch.no_grad():
        model(ids[:, :-ASKED], past_key_values=cache)
        return model(ids[:, -ASKED:], past_key_values=cache).logits.log_softmax(-1)


def divergence(expected: Tensor, found: Tensor) -> float:
    """Mean Kullback-Leibler divergence in nats."""
    return (expected.exp() * (expected - found)).sum(-1).mean().item()


def test_outlier_channels_cost_nothing_where_keys_are_turned() -> None:
    model, tokenizer = embedded.load()
    samples = make_samples("kv_recall_many", tokenizer, 512, 6, 0)
    texts = [tokenizer(sample.context + sample.question + sample.answers[0])["input_ids"][-480:] for sample in samples]
    ids = torch.tensor(texts)
    planted = with_outliers(model)
    full = says(model, ids, None)
    assert (says(planted, ids, None) - full).abs().max() < 1e-3, "planting changes nothing"
    plain, turned, not_turned = (
        divergence(full, found)
        for found in (says(model, ids, 4), says(planted, ids, 4), says(planted, ids, 4, turned=False))
    )
    assert turned < 2 * plain, "nothing that could be told from rounding itself"
    assert not_turned > 100 * turned

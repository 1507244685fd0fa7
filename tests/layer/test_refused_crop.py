"""A crop that is refused changes nothing: neither in the layers that evict nor in those of transformers beside them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.layer.hybrid import HybridLayer
from hf_paged_eviction.layer.paged import PagedLayer

TEXT = torch.stack(models.prompts([60, 60], seed=4))
ONES = torch.ones_like(TEXT)


#: A layer that evicts comes first and one that refuses last, so that the first must be put back.
PAGED_FIRST = {
    "gemma3": {"layer_types": ["full_attention", "sliding_attention"]},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "full_attn_idxs": [1],
        "num_hidden_layers": 3,
    },
}


@cache
def model_of(family: str) -> Any:
    return models.build(family, **PAGED_FIRST.get(family, {}))


def feed(family: str, cache: Any, start: int, stop: int) -> Tensor:
    return modes.forward(model_of(family), cache, TEXT, ONES, start, stop)


def make(family: str, **settings: Any) -> PagedEvictionCache:
    if reason := models.unavailable(family):
        pytest.skip(reason)
    return models.paged(model_of(family).config, **{"budget": 24, "block_size": 4, **settings})


def contents(layer: Any) -> dict[str, Any]:
    """What a layer holds and knows, by name."""
    if isinstance(layer, PagedLayer):
        pending = layer.state.pending
        held = {"keys": layer.keys[:, :, : layer.held], "values": layer.values[:, :, : layer.held]}
        waiting = {} if pending is None else {"waiting_keys": pending.keys, "waiting_values": pending.values}
        records = {"positions": layer.positions, "table": layer.block_table(), "seen": layer.get_seq_length()}
        return held | waiting | records
    contents = dict(vars(layer))
    for name, value in vars(layer).items():
        if isinstance(value, dict | list):
            contents |= {
                f"{name}.{at}": one for at, one in (value.items() if isinstance(value, dict) else enumerate(value))
            }
            del contents[name]
    return contents


def refused(family: str, cache: PagedEvictionCache, argument: int, error: Any = (ValueError, RuntimeError)) -> None:
    """The crop is refused, and every layer is what it was; then the text goes on as if nothing had been asked."""
    untouched = copy.deepcopy(cache)
    before = [contents(layer) for layer in untouched.layers]
    with pytest.raises(error):
        cache.crop(argument)
    for index, (layer, expected) in enumerate(zip(cache.layers, before, strict=True)):
        now = contents(layer)
        assert now.keys() == expected.keys()
        for name, value in now.items():
            same = torch.equal(value, expected[name]) if isinstance(value, Tensor) else value == expected[name]
            assert same or value is expected[name], f"layer {index}, {name}"
    seen = cache.get_seq_length()
    assert torch.equal(feed(family, cache, seen, seen + 1), feed(family, untouched, seen, seen + 1))


def test_tokens_that_wait_and_some_that_are_gone() -> None:
    """Four wait and could be dropped, but of those before them some were evicted."""
    cache = make("llama", policy="key_norm", sink_tokens=0)
    feed("llama", cache, 0, 20)
    for at in range(20, 37):
        feed("llama", cache, at, at + 1)
    cache.activate_past_recording()
    feed("llama", cache, 37, 41)
    refused("llama", cache, -22, ValueError)


@pytest.mark.parametrize("argument", [-2, 28])
def test_a_sliding_layer_that_recorded_nothing(argument: int) -> None:
    cache = make("gemma3", budget=48)
    feed("gemma3", cache, 0, 30)
    refused("gemma3", cache, argument)


@pytest.mark.skipif(models.VERSION < (5, 15), reason="sliding layers cannot record")
def test_a_sliding_layer_that_recorded_less() -> None:
    """It would go on with a window that lacks its first tokens."""
    cache = make("gemma3", budget=48)
    feed("gemma3", cache, 0, 30)
    cache.activate_past_recording()
    feed("gemma3", cache, 30, 34)
    refused("gemma3", cache, -6, ValueError)
    other = make("gemma3", budget=48)
    feed("gemma3", other, 0, 30)
    other.activate_past_recording()
    feed("gemma3", other, 30, 34)
    other.crop(-4)
    straight = make("gemma3", budget=48)
    feed("gemma3", straight, 0, 30)
    assert_close(feed("gemma3", other, 30, 36), feed("gemma3", straight, 30, 36))


def test_a_recurrent_layer_that_recorded_nothing() -> None:
    cache = make("lfm2", budget=48)
    feed("lfm2", cache, 0, 30)
    refused("lfm2", cache, -2)


@pytest.mark.skipif(models.VERSION < (5, 15), reason="recurrent layers cannot record")
def test_the_last_of_several_layers_refuses() -> None:
    """What the earlier ones dropped comes back, lists of states included."""
    cache = make("lfm2", budget=48)
    feed("lfm2", cache, 0, 26)
    cache.activate_past_recording()
    feed("lfm2", cache, 26, 30)
    last = [layer for layer in cache.layers if hasattr(layer, "conv_states")][-1]
    last.record_past = False
    refused("lfm2", cache, -2)


@pytest.mark.skipif(models.VERSION < (5, 15), reason="recurrent layers cannot record")
def test_a_layer_with_a_convolution_refuses_by_itself() -> None:
    """More than was recorded since the last crop is refused by its own `crop` as by that of the cache."""
    layer = next(hybrid for hybrid in make("falcon_h1", budget=48).layers if isinstance(hybrid, HybridLayer))
    layer.activate_past_recording()
    for count in (10, 2):
        layer.update(*torch.randn(2, 1, 2, count, 8))
        layer.update_conv_state(torch.randn(1, 6, count), conv_kernel_size=4)
        if count == 10:
            layer.crop(0)
    recorded = layer.conv_states[0].clone()
    with pytest.raises(ValueError, match="convolution"):
        layer.crop(-5)
    assert layer.get_seq_length() == 12 and torch.equal(layer.conv_states[0], recorded)
    layer.crop(-2)
    assert layer.get_seq_length() == 10 and torch.equal(layer.conv_states[0], recorded[..., :4])


@pytest.mark.parametrize("argument", [-3, 4])
def test_within_the_window_both_spellings_do_the_same(argument: int) -> None:
    """In every release: some know only one of them."""
    cache, straight = make("gemma3", budget=48), make("gemma3", budget=48)
    feed("gemma3", cache, 0, 7)
    cache.crop(argument)
    feed("gemma3", straight, 0, 4)
    assert [layer.get_seq_length() for layer in cache.layers] == [4] * len(cache.layers)
    assert_close(feed("gemma3", cache, 4, 20), feed("gemma3", straight, 4, 20))


@pytest.mark.parametrize("argument", [0, 30, 40])
@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_taking_back_nothing_does_nothing(family: str, argument: int) -> None:
    cache = make(family, budget=48)
    feed(family, cache, 0, 30)
    before = copy.deepcopy(cache)
    cache.crop(argument)
    assert cache.get_seq_length() == 30
    assert torch.equal(feed(family, cache, 30, 32), feed(family, before, 30, 32))


def test_evicted_tokens_count_where_nothing_that_is_held_is_left() -> None:
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, budget=5, block_size=1, policy="recency")
    ids = models.prompts([6])[0][None]
    modes.forward(model, cache, ids, torch.ones_like(ids), 0, 6)
    for taken, held, evicted in ((4, 1, 1), (1, 0, 1), (1, 0, 0)):  # the first token was evicted
        cache.crop(-taken)
        stats = cache.stats()
        assert (stats.mean_held, stats.evicted_tokens) == (held, evicted * len(cache.layers))

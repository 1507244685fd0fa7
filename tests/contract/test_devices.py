"""Layers on different devices, and decoding that never looks at a tensor."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.queries.observer import Queries
from policy_kinds import NAMES

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore:A batch of several rows arrived")]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_model_split_by_accelerate_gives_the_same_tokens(tmp_path: Path, padded: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    whole = models.shared("llama")
    split = deepcopy(whole)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    accelerate.dispatch_model(split, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    ids, mask = modes.batch("greedy", padded)
    expected = modes.run(whole, PagedEvictionCache(whole.config, budget=24, block_size=4), "greedy", ids, mask)
    cache = PagedEvictionCache(split.config, budget=24, block_size=4)
    assert (modes.run(split, cache, "greedy", ids, mask) == expected).all()
    assert cache.stats().evicted_tokens > 0


def feed(cache: PagedEvictionCache, index: int, count: int, device: torch.device) -> None:
    """Random tokens to one layer, and their queries where it wants them."""
    states = torch.randn(2, 2, count, 8).to(device)
    if index == 0:
        cache.get_mask_sizes(count)
    keys, values = cache.update(states, states, index)
    assert keys.device == values.device == device
    if (layer := cache.layers[index]).recorder is not None:
        layer.attended(Queries(torch.randn(2, 4, count, 8).to(device), keys, Logits(8**-0.5)))


@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("policy", NAMES)
def test_each_layer_lives_where_its_keys_are(policy: str, heads: str) -> None:
    """A tensor on `meta` has no content: reading one, or mixing devices, would raise."""
    config = models.shared("llama", "paged_eviction").config
    cache = PagedEvictionCache(config, budget=24, block_size=4, policy=policy, heads=heads)
    devices = [torch.device("cpu"), torch.device("meta")]
    for count in (5, *[1] * 22, 30, 1, 7, 1):
        for index, device in enumerate(devices):
            feed(cache, index, count, device)
    for index, device in enumerate(devices):
        layer = cache.layers[index]
        assert layer.held == 24
        assert layer.get_seq_length() == 66
        assert layer.keys.device == layer.positions.device == layer.block_scores().device == device

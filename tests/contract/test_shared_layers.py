"""Layers that attend to the keys and values of an earlier layer (gemma3n, gemma4), and keys attended to twice.

What such a layer may see is what its source could see when it attended, though the source may have evicted since.
"""

from typing import Any

import pytest
import torch
import transformers

import models
import modes
from closeness import assert_close
from evicting import exact
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from reference import shared_layers

pytestmark = pytest.mark.contract

#: Layers or heads hold different numbers, so that each layer makes its mask itself.
UNEQUAL: dict[str, dict[str, Any]] = {
    "layers": {"allocator": "heads:[[2], [3]]"},
    "pyramid": {"allocator": "pyramid"},
    "cake": {"allocator": "cake"},
    "d2o": {"allocator": "d2o"},
    "ada_kv": {"allocator": "ada_kv", "heads": "separate"},
}


def two_sources(family: str) -> Any:
    """Two full layers that page, the second of which a third layer shares; a sliding layer is shared as well."""
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    if reason := models.unavailable(family):
        pytest.skip(reason)
    return models.build(family, "paged_eviction", num_hidden_layers=5, layer_types=types)


def cache_of(model: Any, settings: dict[str, Any], budget: int = 24) -> PagedEvictionCache:
    options = {"budget": budget, "block_size": 4, **settings}
    return PagedEvictionCache(model.config, **options)


def shares_without_a_cache(model: Any) -> bool:
    """Not in early releases: what they say without a cache is no reference."""
    ids = torch.stack(models.prompts([9]))
    with torch.no_grad():
        return torch.allclose(model(ids, use_cache=False).logits, model(ids, use_cache=True).logits, atol=1e-3)


@pytest.fixture(scope="module", params=models.SHARED)
def model(request: pytest.FixtureRequest) -> Any:
    return two_sources(request.param)


def test_the_models_share(model: Any) -> None:
    assert shared_layers(model.config) == {3: 1, 4: 2}
    assert [index for index, _ in cache_of(model, {}).paged_layers] == [0, 2]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", ["greedy", "direct", "two_turns", "beam"])
@pytest.mark.parametrize("name", UNEQUAL)
def test_exact(model: Any, name: str, mode: str, padded: bool) -> None:
    cache = cache_of(model, UNEQUAL[name])
    ids, mask = modes.batch(mode, padded)
    with exact(model, cache, replayed=not shares_without_a_cache(model)):
        modes.run(model, cache, mode, ids, mask, steps=8)


@pytest.mark.parametrize("mode", ["greedy", "direct"])
@pytest.mark.parametrize("name", UNEQUAL)
def test_whole_in_the_budget_is_dynamic_cache(model: Any, name: str, mode: str) -> None:
    ids, mask = modes.batch(mode, padded=True)
    cache = cache_of(model, UNEQUAL[name], budget=1280)  # the top of a pyramid holds a twentieth of it
    expected = modes.run(model, modes.dynamic(model), mode, ids, mask)
    assert (modes.run(model, cache, mode, ids, mask) == expected).all()
    assert cache.stats().evicted_tokens == 0


@pytest.mark.parametrize("policy", ["key_norm", "h2o"])
def test_one_budget(model: Any, policy: str) -> None:
    """Every layer holds the same number: the model's own mask serves them all."""
    cache = cache_of(model, {"policy": policy})
    ids, mask = modes.batch("direct", padded=True)
    with exact(model, cache, replayed=not shares_without_a_cache(model)):
        modes.run(model, cache, "direct", ids, mask, steps=8)


@pytest.mark.parametrize("newest", [1, 3])
@pytest.mark.parametrize("name", ["layers", "uniform"])
def test_logits_to_keep_without_pads(name: str, newest: int) -> None:
    """gemma4 feeds its sharing layers the last queries only; without a mask they must not count from the first key."""
    model = two_sources("gemma4")
    ids, mask = modes.batch("direct", padded=False)
    settings = UNEQUAL.get(name, {})

    def last(count: int) -> torch.Tensor:
        with torch.no_grad():
            cache = cache_of(model, settings, budget=64)
            return model(input_ids=ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, logits_to_keep=count).logits

    assert_close(last(newest), last(0)[:, -newest:])


@pytest.mark.parametrize(
    ("name", "stop", "message"), [("layers", 40, r"several devices|changes keys"), ("ada_kv", 40, "changes keys")]
)
def test_a_mask_that_was_not_replaced_is_noticed(name: str, stop: int, message: str) -> None:
    """As where shared keys were copied to another device, and what was noted on them is lost."""
    model = two_sources("gemma4")
    cache = cache_of(model, UNEQUAL[name])
    ids, mask = modes.batch("greedy", padded=False)
    ids, mask = torch.cat([ids, ids[:, :1]], dim=1), modes.extend(mask, 1)
    modes.forward(model, cache, ids, mask, 0, stop)
    sharing = model.model.layers[4].self_attn
    copied = sharing.forward

    def with_copies(*args: Any, shared_kv_states: Any, **kwargs: Any) -> Any:
        copies = {kind: tuple(states.clone() for states in pair) for kind, pair in shared_kv_states.items()}
        return copied(*args, shared_kv_states=copies, **kwargs)

    sharing.forward = with_copies
    with pytest.raises(ValueError, match=message if model.device.type == "cpu" else "several devices"):
        modes.forward(model, cache, ids, mask, stop, stop + 1)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    "settings",
    [{"allocator": "heads:[[2], [3]]", "heads": "shared"}, {"policy": "h2o"}, {"allocator": "cake"}],
    ids=str,
)
def test_keys_attended_to_twice(settings: dict[str, Any], padded: bool) -> None:
    """diffllama calls attention twice per layer, once for each half of the values."""
    if reason := models.unavailable("diffllama"):
        pytest.skip(reason)
    if not transformers.DiffLlamaForCausalLM._can_set_attn_implementation():
        pytest.skip("computes attention by code of its own in this transformers release")
    model = models.build("diffllama", "paged_eviction")
    cache = PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, **settings})
    ids, mask = modes.batch("direct", padded)
    with exact(model, cache, replayed=not shares_without_a_cache(model)):
        modes.run(model, cache, "direct", ids, mask, steps=8)

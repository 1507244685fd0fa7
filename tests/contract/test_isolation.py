"""Promise 6: state lives on the cache, and transformers stays as it is."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface

import models
import modes
import untouched
from hf_paged_eviction import PagedEvictionCache
from processes import in_processes

pytestmark = pytest.mark.contract


def test_transformers_stays_as_it_is() -> None:
    """In a process of its own, where nothing has touched the package yet."""
    assert in_processes(1, untouched.check) == ["unchanged"]


def test_masks_are_wrapped_once() -> None:
    model = models.shared("llama")
    for _ in range(3):
        PagedEvictionCache(model.config, budget=24, block_size=4)
    before = dict(AttentionMaskInterface._global_mapping)
    PagedEvictionCache(model.config, budget=32, block_size=4)
    assert dict(AttentionMaskInterface._global_mapping) == before


def test_wrapped_masks_hand_foreign_caches_through() -> None:
    """A mask built for a DynamicCache is the very result of the function underneath."""
    model = models.shared("llama", "eager")
    PagedEvictionCache(model.config, budget=24, block_size=4)
    wrapped = AttentionMaskInterface._global_mapping["sdpa"]
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    seen: dict[str, Any] = {}
    inner = wrapped.__wrapped__
    settings = {"batch_size": 2, "attention_mask": mask, "allow_is_causal_skip": False}
    settings |= {"q_length": 9, "kv_length": 9, "q_offset": 0, "kv_offset": 0}
    for name, function in (("wrapped", wrapped), ("inner", inner)):
        seen[name] = function(**settings)
    assert torch.equal(seen["wrapped"], seen["inner"])
    assert not seen["wrapped"].all()


@pytest.mark.parametrize(
    ("attention", "settings"),
    [
        (
            "sdpa",
            [
                {"budget": 24, "block_size": 4},
                {"budget": 16, "policy": "keydiff", "block_size": 2, "heads": "separate"},
            ],
        ),
        ("paged_eviction", [{"budget": 24, "block_size": 4, "policy": "h2o"}] * 2),
    ],
    ids=["keys", "queries"],
)
def test_two_caches_side_by_side(attention: str, settings: list[dict[str, Any]]) -> None:
    """Interleaved step by step, two caches of one model give what each gives on its own, to the bit."""
    model = models.shared("llama", attention)
    inputs = [modes.batch("direct", padded=True), models.left_pad(models.prompts([38, 40], seed=9))]

    def forwards(which: int, cache: PagedEvictionCache) -> Any:
        ids, mask = inputs[which]
        for start, stop in [(0, 25), (25, 26), (26, 30), *((at, at + 1) for at in range(30, 40))]:
            yield modes.forward(model, cache, ids, mask, start, stop)

    alone = [list(forwards(which, PagedEvictionCache(model.config, **settings[which]))) for which in range(2)]
    runs = [forwards(which, PagedEvictionCache(model.config, **settings[which])) for which in range(2)]
    for one, other, expected_one, expected_other in zip(*runs, *alone, strict=True):
        assert torch.equal(one, expected_one)
        assert torch.equal(other, expected_other)


def test_one_policy_object_serves_two_caches() -> None:
    from hf_paged_eviction import make_policy

    model = models.shared("llama")
    policy = make_policy("keydiff")
    state = dict(vars(policy))
    caches = [PagedEvictionCache(model.config, budget=24, block_size=4, policy=policy) for _ in range(2)]
    for seed, cache in enumerate(caches):
        modes.run(model, cache, "greedy", *modes.batch("greedy", padded=True, seed=seed))
    assert vars(policy) == state
    fresh = PagedEvictionCache(model.config, budget=24, block_size=4, policy="keydiff")
    modes.run(model, fresh, "greedy", *modes.batch("greedy", padded=True, seed=1))
    assert torch.equal(fresh.layers[0].positions, caches[1].layers[0].positions)


def test_no_automatic_compilation() -> None:
    """generate compiles by itself for caches that say they can be; a subclass of DynamicCache must not."""
    cache = PagedEvictionCache(models.shared("llama").config, budget=24, block_size=4)
    assert isinstance(cache, DynamicCache)
    assert cache.is_compileable is False
    cache._is_user_defined = True  # generate marks the cache it was given
    assert all(layer._layer_type is None for layer in cache.layers if hasattr(layer, "_layer_type"))


@pytest.mark.parametrize("kind", [PagedEvictionCache, type("Own", (PagedEvictionCache,), {})])
def test_the_class_is_no_cache(kind: type[PagedEvictionCache]) -> None:
    """`generate` marks what it was given, and a mark on the class would switch the guards of all caches off."""
    model, ids = models.shared("llama"), models.prompts([12])[0][None]
    says = r"an object, not the class: pass \w+\(model.config"
    if models.VERSION < (5, 24):  # older releases call its methods before they mark it
        says += "|missing 1 required positional argument: 'self'"
    with pytest.raises(TypeError, match=says):
        modes.generate(model, kind, ids, torch.ones_like(ids), 4)
    cache = kind(model.config, budget=64, policy="keydiff")
    modes.generate(model, cache, ids, torch.ones_like(ids), 4)
    with pytest.raises(ValueError, match=r"(was|were) seen"):
        modes.generate(model, cache, ids, torch.ones_like(ids), 4)

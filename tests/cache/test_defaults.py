"""What a cache does where nobody says which policy, and how a model's calibration is found by its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.learned.calibration import (
    Calibration,
    LayerScore,
    find_calibration,
    save_calibration,
    shelf,
    shelf_name,
)
from hf_paged_eviction.learned.calibration.calibration import fingerprint
from hf_paged_eviction.learned.calibration.features import SCALARS, Means
from hf_paged_eviction.learned.calibration.shelf import _PUBLISHED
from hf_paged_eviction.options.defaults import defaults
from hf_paged_eviction.queries.attention import PAGED_EVICTION

NAME = "someone/Tiny-Model"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path / "home"))
    shelf().mkdir(parents=True)
    return shelf()


def named_model(attention: str = "sdpa", name: str = NAME) -> Any:
    model = models.build("llama", attention)
    model.config._name_or_path = name
    return model


def put_on_shelf(config: Any) -> Path:
    """A calibration of random numbers under the name of the model."""
    torch.manual_seed(1)
    text, heads = config.get_text_config(), config.num_key_value_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = {
        index: LayerScore(
            Means(torch.randn(heads, width), torch.randn(heads, width)),
            torch.randn(heads, len(SCALARS) + width),
            torch.zeros(heads),
            torch.tensor([[-9.0, 9.0]] * heads),
            torch.tensor([[0.0, 1.0]] * heads),
        )
        for index in range(text.num_hidden_layers)
    }
    path = shelf() / str(shelf_name(config))
    save_calibration(Calibration(layers, fingerprint(config)), path)
    return path


def test_a_model_without_a_calibration_gets_the_published_policy() -> None:
    cache = PagedEvictionCache(named_model().config, budget=64)
    assert cache.policy.label == "paged_eviction"
    assert cache.paged_layers[0][1].budget.recent == 16


def test_latents_get_a_policy_that_makes_sense_of_them() -> None:
    if models.caches_latents():
        config = models.family_config("deepseek_v3")
        assert PagedEvictionCache(config, budget=64).policy.label == "keydiff"


def test_a_calibration_is_found_by_name_with_one_threshold_where_attention_allows() -> None:
    path = put_on_shelf(named_model().config)
    plain = PagedEvictionCache(named_model().config, budget=256)
    ours = PagedEvictionCache(named_model(PAGED_EVICTION).config, budget=256)
    for cache, policy, allocator in ((plain, "calibrated", "uniform"), (ours, "observed", "global")):
        assert cache.policy.label == f"{policy}:{path}"
        assert cache._options.allocator.label == allocator
        layer = cache.paged_layers[0][1]
        assert layer.heads == "separate"
        assert (layer.budget.protected, layer.budget.recent) == (4, 32), "an eighth of the budget is new"
    assert (
        PagedEvictionCache(named_model().config, budget=256, policy="paged_eviction").policy.label == "paged_eviction"
    )
    assert PagedEvictionCache(named_model("sdpa", "someone/else").config, budget=64).policy.label == "paged_eviction"


OPTIONS: list[dict[str, Any]] = [
    {"budget": 64},
    {"budget": 48},
    {"budget": [64, 96]},
    {"budget": "50%"},
    {"budget": "64KiB"},
    {"budget": 64, "static": True},
    {"budget": 64, "bits": 8},
    {"budget": 64, "positions": "cache"},
    {"budget": 64, "disposal": "recall"},
    {"budget": 64, "heads": "shared"},
    {"budget": 64, "allocator": "pyramid"},
    {"budget": 64, "recent_tokens": 0, "sink_tokens": 0},
]


@pytest.mark.parametrize("attention", ["sdpa", PAGED_EVICTION])
@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_whatever_else_is_asked_for_the_default_serves_it_if_the_published_policy_does(
    given: dict[str, Any], attention: str
) -> None:
    model = named_model(attention)
    ids = torch.arange(3, 143)[None] % model.config.vocab_size

    def run(**more: Any) -> PagedEvictionCache:
        cache = PagedEvictionCache(model.config, **given, **more)
        with torch.no_grad():
            for part in (ids[:, :120], ids[:, 120:121], ids[:, 121:]):
                model(part, **{CACHE_ARGUMENT: cache})
        return cache

    try:
        run(policy="paged_eviction")
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error)[:40])):
            run()
        return
    put_on_shelf(model.config)
    observes = attention == PAGED_EVICTION and "static" not in given and given["budget"] != [64, 96]
    assert run().policy.name == ("observed" if observes else "calibrated")


@pytest.mark.filterwarnings("ignore:Attention now reaches further")
@pytest.mark.parametrize("budget", ["50%", f"{256 * 2 * 2 * 2 * 8 * 4}B"], ids=["share", "bytes"])
def test_a_share_and_bytes_are_the_same_default(tmp_path: Path, budget: str) -> None:
    """One threshold, an eighth for the newest tokens; also in a file, and when it comes back."""
    model = named_model(PAGED_EVICTION)
    put_on_shelf(model.config)
    ids = torch.arange(3, 543)[None] % model.config.vocab_size
    found, known = (PagedEvictionCache(model.config, budget=size) for size in (budget, 256))
    with torch.no_grad():
        for cache in (found, known):
            model(ids[:, :512], **{CACHE_ARGUMENT: cache})
        assert found._options.allocator.label == "global" and found.budget == 256
        found.save(tmp_path / "half.safetensors")
        back = PagedEvictionCache.load(tmp_path / "half.safetensors", model.config)
        for cache in (found, known, back):
            model(ids[:, 512:], **{CACHE_ARGUMENT: cache})
    for cache in (found, back):
        for (_, ours), (_, theirs) in zip(cache.paged_layers, known.paged_layers, strict=True):
            assert ours.budget.recent == 32 and torch.equal(ours.positions, theirs.positions)


def test_a_default_cache_shrinks_and_is_saved(tmp_path: Path) -> None:
    model = named_model()
    put_on_shelf(model.config)
    cache = PagedEvictionCache(model.config, budget=256)
    ids = torch.arange(3, 203)[None] % model.config.vocab_size
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
    cache.shrink(48)
    assert cache.budget == 48
    cache.save(tmp_path / "c.safetensors", input_ids=ids)
    loaded = PagedEvictionCache.load(tmp_path / "c.safetensors", model.config)
    assert loaded.policy == cache.policy
    assert loaded.paged_layers[0][1].budget == cache.paged_layers[0][1].budget


def test_errors_are_those_of_what_was_asked() -> None:
    put_on_shelf(named_model().config)
    with pytest.raises(ValueError, match="Smallest legal budget: 48"):
        PagedEvictionCache(named_model().config, budget=16)


def test_another_shape_and_a_broken_file_are_passed_over(home: Path) -> None:
    config = named_model().config
    put_on_shelf(config)
    config.hidden_size *= 2
    with pytest.warns(UserWarning, match=r"passed over: hidden_size \d+ instead of"):
        assert find_calibration(config) is None
    (home / str(shelf_name(config))).write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="passed over: Cannot use the calibration"):
        assert [each.name for each in defaults(config)] == ["paged_eviction"]


def test_folders_of_one_name_are_different_models(tmp_path: Path) -> None:
    names = set()
    for folder in ("a", "b"):
        (tmp_path / folder / "checkpoint").mkdir(parents=True)
        names.add(shelf_name(named_model(name=str(tmp_path / folder / "checkpoint")).config))
    assert len(names) == 2
    assert all(str(name).startswith("checkpoint-") for name in names)
    assert shelf_name(named_model(name="").config) is None
    assert shelf_name(named_model(name="a/b c").config) == "a--b--c.safetensors"


@pytest.mark.parametrize(
    "name",
    ["HuggingFaceTB/SmolLM2-135M-Instruct", "/models/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf"],
)
def test_published_calibrations_fit_their_models(name: str) -> None:
    config = models.smollm2_config()
    config._name_or_path = name
    found = find_calibration(config)
    assert found is not None and found.parent == _PUBLISHED
    assert found.stat().st_size < 2**17
    assert PagedEvictionCache(config, budget=64).policy.name == "calibrated"

"""What a cache does where nobody says which policy, and how a model's profile is found by its weights."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction import PagedEvictionCache, register_weights, weights_digest
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.weights import _REGISTERED
from hf_paged_eviction.learned.calibration import Calibration, model_fingerprint, save_calibration
from hf_paged_eviction.learned.lookup import _published, find_calibration, profile_dir, profile_path
from hf_paged_eviction.learned.score import SCALARS, LayerScore
from hf_paged_eviction.learned.shares import HeadShares
from hf_paged_eviction.options.defaults import WITHOUT_PROFILE, Default, defaults
from hf_paged_eviction.queries.attention import PAGED_EVICTION


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path / "home"))
    profile_dir().mkdir(parents=True)
    return profile_dir()


def a_model(attention: str = "sdpa") -> Any:
    """Whose weights are registered."""
    model = models.build("llama", attention)
    register_weights(model)
    return model


def save_profile(model: Any) -> Path:
    """A calibration of random numbers for the model."""
    config = model.config
    torch.manual_seed(1)
    text, heads = config.get_text_config(), config.num_key_value_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = {
        index: LayerScore(
            torch.randn(heads, width),
            torch.randn(heads, width),
            torch.randn(heads, len(SCALARS) + width),
            torch.zeros(heads),
            torch.tensor([[-9.0, 9.0]] * heads),
            torch.tensor([[0.0, 1.0]] * heads),
        )
        for index in range(text.num_hidden_layers)
    }
    shares = HeadShares((0.25,), {index: torch.tensor([[0.5, 1.5]]) for index in layers})
    path = profile_path(weights_digest(model))
    save_calibration(Calibration(layers, model_fingerprint(model), shares=shares), path)
    return path


@pytest.mark.parametrize(("attention", "policy"), [("sdpa", WITHOUT_PROFILE[2]), (PAGED_EVICTION, WITHOUT_PROFILE[1])])
def test_a_model_without_a_profile_is_told_once_and_gets_what_needs_no_file(attention: str, policy: Default) -> None:
    model = models.build("llama", attention)
    with pytest.warns(UserWarning, match=r"prepare\(model"):
        cache = PagedEvictionCache(model.config, budget=64)
    assert (cache.policy.label, cache.allocator.label) == (policy.policy, policy.allocator)
    assert cache.paged_layers[0][1].budget.recent == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PagedEvictionCache(model.config, budget=64)
        PagedEvictionCache(models.build("llama", attention).config, budget=64, policy="paged_eviction")
    register_weights(other := models.build("llama", attention))
    with pytest.warns(UserWarning, match="no profile of these weights"):
        PagedEvictionCache(other.config, budget=64)


@pytest.mark.filterwarnings("ignore:There is no profile")
def test_bytes_without_a_profile_are_spent_in_few_bits_and_small_blocks() -> None:
    config = models.build("llama", PAGED_EVICTION).config

    def made(**settings: Any) -> tuple[object, int]:
        cache = PagedEvictionCache(config, **settings)
        return cache.bits and tuple(cache.bits), cache.paged_layers[0][1].budget.block_size

    for budget in ("64KiB", "25% of memory"):
        assert made(budget=budget) == ((4, 4), 8)
        assert made(budget=budget, bits=8) == ((8, 8), 8)
        assert made(budget=budget, block_size=16) == ((4, 4), 16)
        assert made(budget=budget, policy="keydiff") == (None, 16)
        assert made(budget=budget, positions="cache") == (None, 16), "which few bits do not go with"
    assert made(budget=64) == made(budget="25%") == (None, 16)
    assert made(budget="50% of memory") == made(budget="75% of memory of 900 tokens") == ((8, 4), 8)


def test_latents_get_a_policy_that_makes_sense_of_them() -> None:
    if models.caches_latents():
        config = models.family_config("deepseek_v3")
        assert PagedEvictionCache(config, budget=64).policy.label == "keydiff"


def test_a_profile_is_found_by_weights_with_its_shares_where_attention_allows() -> None:
    model, other = a_model(), models.randomise(a_model(), seed=7)
    register_weights(other)
    path = save_profile(model)
    with pytest.warns(UserWarning, match=r"calibrated.*best"):
        plain = PagedEvictionCache(model.config, budget=256)
    ours = PagedEvictionCache(a_model(PAGED_EVICTION).config, budget=256)
    for cache, policy, allocator, recent in (
        (plain, "calibrated", "uniform", 32),
        (ours, "observed", "heads", 16),
    ):
        assert (cache.policy.label, cache.profile) == (policy, str(path))
        assert cache.allocator.label == allocator
        layer = cache.paged_layers[0][1]
        assert layer.heads == "separate"
        assert (layer.budget.protected, layer.budget.recent) == (4, recent)
    assert PagedEvictionCache(model.config, budget=256, policy="paged_eviction").policy.label == "paged_eviction"
    assert not PagedEvictionCache(other.config, budget=64).profile


def test_names_do_not_matter() -> None:
    model = a_model(PAGED_EVICTION)
    save_profile(model)
    for name in ("", "someone/Tiny-Model", "/a/folder"):
        model.config._name_or_path = name
        assert PagedEvictionCache(model.config, budget=256).policy.name == "observed"


FALLING_BACK: list[tuple[str, dict[str, Any], str]] = [
    ("sdpa", {}, "model.set_attn_implementation"),
    (PAGED_EVICTION, {"protect": [[(8, 9)], [(4, 5)]], "budget": 96}, "spans for 2 rows"),
]


@pytest.mark.parametrize(("attention", "settings", "reason"), FALLING_BACK, ids=str)
def test_one_warning_says_why_it_is_not_the_best(attention: str, settings: dict[str, Any], reason: str) -> None:
    model = a_model(attention)
    save_profile(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = PagedEvictionCache(model.config, **{"budget": 64, **settings})
    assert cache.policy.name == "calibrated"
    (warning,) = caught
    message = str(warning.message)
    assert "takes calibrated where observed@heads would be best" in message and reason in message
    assert warning.filename == __file__
    assert "policy='calibrated'" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PagedEvictionCache(model.config, **{"budget": 64, **settings}, policy="calibrated")


OPTIONS: list[dict[str, Any]] = [
    {"budget": 64},
    {"budget": 48},
    {"budget": "50%"},
    {"budget": "64KiB"},
    {"budget": 64, "static": True, "bits": 8},
    {"budget": 64, "bits": 8},
    {"budget": 64, "positions": "cache"},
    {"budget": 64, "heads": "shared"},
    {"budget": 64, "allocator": "pyramid"},
    {"budget": 64, "recent_tokens": 0, "sink_tokens": 0},
]


@pytest.mark.filterwarnings("ignore:policy=.auto. takes")
@pytest.mark.parametrize("attention", ["sdpa", PAGED_EVICTION])
@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_whatever_else_is_asked_for_the_default_serves_it_if_the_published_policy_does(
    settings: dict[str, Any], attention: str
) -> None:
    model = a_model(attention)
    ids = torch.arange(3, 143)[None] % model.config.vocab_size

    def run(**more: Any) -> PagedEvictionCache:
        cache = PagedEvictionCache(model.config, **settings, **more)
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
    save_profile(model)
    observes = attention == PAGED_EVICTION and settings.get("heads") != "shared" and settings["budget"] != [64, 96]
    assert run().policy.name == ("observed" if observes else "calibrated")


@pytest.mark.filterwarnings("ignore:Attention now reaches further")
@pytest.mark.parametrize("budget", ["50%", f"{256 * 2 * 2 * 2 * 8 * 4}B"], ids=["share", "bytes"])
def test_a_share_and_bytes_are_the_same_default(tmp_path: Path, budget: str) -> None:
    """Also in a file, and when it comes back."""
    model = a_model(PAGED_EVICTION)
    save_profile(model)
    ids = torch.arange(3, 543)[None] % model.config.vocab_size
    sized, by_tokens = (PagedEvictionCache(model.config, budget=size) for size in (budget, 256))
    with torch.no_grad():
        for cache in (sized, by_tokens):
            model(ids[:, :512], **{CACHE_ARGUMENT: cache})
        assert sized.allocator.name == "heads" and sized.budget == 256
        sized.save(tmp_path / "half.safetensors")
        back = PagedEvictionCache.load(tmp_path / "half.safetensors", model.config)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The budget is")  # a context that was loaded knows no first forward
            for cache in (sized, by_tokens, back):
                model(ids[:, 512:], **{CACHE_ARGUMENT: cache})
    for cache in (sized, back):
        for (_, ours), (_, expected) in zip(cache.paged_layers, by_tokens.paged_layers, strict=True):
            assert torch.equal(ours.positions, expected.positions)


def test_the_warning_of_a_share_has_the_budget_of_the_cache(tmp_path: Path) -> None:
    """Not that of the head that holds most."""
    model = a_model(PAGED_EVICTION)
    save_profile(model)
    cache = PagedEvictionCache(model.config, budget="50%")
    ids = torch.arange(3, 771)[None] % model.config.vocab_size
    with torch.no_grad():
        model(ids[:, :384], **{CACHE_ARGUMENT: cache})
        with pytest.warns(UserWarning, match=r"which were 384: it is 192 tokens per layer.*the 384 that come now"):
            model(ids[:, 384:], **{CACHE_ARGUMENT: cache})
    assert cache.budget == 192


@pytest.mark.filterwarnings("ignore:policy=.auto. takes")
def test_a_default_cache_shrinks_and_is_saved(tmp_path: Path) -> None:
    model = a_model()
    save_profile(model)
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
    model = a_model()
    save_profile(model)
    with pytest.raises(ValueError, match=r"Smallest.*48"):
        PagedEvictionCache(model.config, budget=16)


def test_other_weights_and_a_broken_file_are_passed_over() -> None:
    model, other = a_model(), models.randomise(a_model(), seed=7)
    digest = register_weights(other)
    save_profile(model).rename(profile_path(digest))
    with pytest.warns(UserWarning, match=f"{digest}"):
        assert find_calibration(other.config) is None
    profile_path(digest).write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="skipped"):
        assert defaults(other.config) == WITHOUT_PROFILE[1:]


def test_a_calibration_of_other_weights_is_refused_by_name_too(tmp_path: Path) -> None:
    """`profile=` where the weights are known; also of "auto", and of policies inside others."""
    model, other = a_model(PAGED_EVICTION), models.randomise(a_model(PAGED_EVICTION), seed=7)
    path = save_profile(model).rename(tmp_path / "c.safetensors")
    register_weights(other)
    for policy in ("calibrated", "observed", "hybrid(tova, calibrated)", "auto"):
        assert PagedEvictionCache(model.config, budget=64, policy=policy, profile=path).profile == str(path)
        with pytest.raises(ValueError, match=r"another model.*weights"):
            PagedEvictionCache(other.config, budget=64, policy=policy, profile=path)


def test_the_published_calibration_fits_its_model() -> None:
    """Whatever the weights are called; here its digest is taken for granted."""
    config = models.smollm2_config()
    (digest, path), *_ = _published().items()
    assert find_calibration(config) is None
    _REGISTERED[config] = digest
    try:
        assert find_calibration(config) == path
        assert path.stat().st_size < 2**17
        with pytest.warns(UserWarning, match="set_attn_implementation"):
            assert PagedEvictionCache(config, budget=64).policy.name == "calibrated"
    finally:
        del _REGISTERED[config]

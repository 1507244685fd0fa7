"""Who may count positions in the cache, and who is told to."""

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.window import trained_window


def cache_of(model: Any, **options: Any) -> PagedEvictionCache:
    return PagedEvictionCache(model.config, **{"budget": 24, "block_size": 4, **options})


def feed(model: Any, cache: Any, start: int, stop: int) -> None:
    with torch.no_grad():
        model(torch.full((1, stop - start), 9), position_ids=torch.arange(start, stop)[None], **{CACHE_ARGUMENT: cache})


def test_passing_the_window_warns_once() -> None:
    model = models.build("llama", max_position_embeddings=60)
    cache = cache_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(model, cache, 0, 50)
        for at in range(50, 60):
            feed(model, cache, at, at + 1)
    with pytest.warns(UserWarning, match=r'60.*positions="cache"'):
        feed(model, cache, 60, 61)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(model, cache, 61, 62)
        feed(model, copy.deepcopy(cache), 62, 70)


def test_positions_in_the_cache_stay_inside() -> None:
    model = models.build("llama", max_position_embeddings=60)
    cache = cache_of(model, positions="cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for at in range(0, 200, 20):
            feed(model, cache, at, at + 20)
        feed(model, cache, 200, 201)
    with pytest.warns(UserWarning, match=r"smaller.*fewer"):
        feed(model, cache, 201, 250)


@pytest.mark.filterwarnings("ignore:Passing")
def test_models_without_distances_are_left_in_peace() -> None:
    """The layers of llama4 that evict do not rotate."""
    if reason := models.unavailable("llama4"):
        pytest.skip(reason)
    model = models.build("llama4", max_position_embeddings=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "(?s).*no profile")
        cache = cache_of(model)
        feed(model, cache, 0, 60)
    assert cache.get_seq_length() > model.config.max_position_embeddings


def test_the_way_out_is_not_shown_where_there_is_none() -> None:
    model = models.build("llama", max_position_embeddings=40)
    config = copy.deepcopy(model.config)
    settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config.rope_parameters = config.rope_scaling = settings
    cache = PagedEvictionCache(config, budget=24, block_size=4)
    with pytest.warns(UserWarning, match=r"moved.*length"):
        feed(model, cache, 0, 60)


def test_static_caches_warn_too() -> None:
    model = models.build("llama", max_position_embeddings=60)
    ids, mask = models.left_pad(models.prompts([50]))
    with pytest.warns(UserWarning, match="60 tokens"):
        modes.generate(model, cache_of(model, static=True), ids, mask, 15)


def test_stretched_windows() -> None:
    def config(**rope: Any) -> Any:
        settings = {"max_position_embeddings": 4096, "rope_scaling": {"rope_theta": 1e4, **rope}}
        return AutoConfig.for_model("llama", **settings)

    assert trained_window(config(rope_type="default")) == 4096
    assert trained_window(config(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)) == 16384
    assert trained_window(AutoConfig.for_model("bloom")) is None

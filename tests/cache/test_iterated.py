"""`for keys, values, window in cache`: what is held, in the order of the text."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import models
import modes
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recording": {"record_past": True},
    "static": {"static": True},
    "own heads": {"heads": "separate"},
    "observing": {"policy": "h2o"},
    "in the cache": {"positions": "cache"},
    "pyramid": {"allocator": "pyramid"},
}
LENGTHS = {"alone": [24], "left-padded": [24, 17]}


def fed(model: Any, cache: Any, lengths: list[int], holes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = models.left_pad(models.prompts(lengths))
    if holes:
        mask[:, 12:14] = 0
    with torch.no_grad():
        for at, stop in [(0, 20), *((at, at + 1) for at in range(20, 23))]:
            positions = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, at:]
            model(ids[:, at:stop], attention_mask=mask[:, :stop], position_ids=positions, **{CACHE_ARGUMENT: cache})
    return ids, mask


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("budget", "holes"), [(64, False), (24, False), (64, True)])
def test_as_a_dynamic_cache_while_nothing_is_evicted(
    settings: dict[str, Any], budget: int, holes: bool, lengths: list[int]
) -> None:
    model = models.shared("llama", "paged_eviction")
    if (settings.get("static") and holes) or ("allocator" in settings and (holes or len(lengths) > 1)):
        return
    budget = 64 if "allocator" in settings else budget
    cache, plain = models.paged(model.config, **{"budget": budget, "block_size": 4, **settings}), DynamicCache()
    _, mask = fed(model, cache, lengths, holes)
    fed(models.shared("llama"), plain, lengths, holes)
    copied = DynamicCache(ddp_cache_data=list(cache))
    assert copied.get_seq_length() == 23
    real = mask[:, None, :23, None].bool()
    for one, other in zip(copied.layers, plain.layers, strict=True):
        torch.testing.assert_close(one.keys * real, other.keys * real)
        torch.testing.assert_close(one.values * real, other.values * real)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_is_left_is_in_the_order_of_the_text(settings: dict[str, Any], lengths: list[int]) -> None:
    if "allocator" in settings and len(lengths) > 1:
        return
    model = models.shared("llama", "paged_eviction")
    cache, plain = models.paged(model.config, **{"budget": 16, "block_size": 4, **settings}), DynamicCache()
    fed(model, cache, lengths)
    cache.crop(0) if settings.get("record_past") else None
    fed(models.shared("llama"), plain, lengths)
    with pytest.warns(UserWarning, match=r"23.*fewer"):
        layers = list(cache)
    for (keys, values, window), layer in zip(layers, cache.layers, strict=True):
        assert window is None
        assert keys.shape[2] == values.shape[2] <= layer.held
    first, whole = layers[0], plain.layers[0]  # later layers have attended to fewer
    for row, length in enumerate(lengths):
        for head in range(2):
            places = cache.layers[0].positions[row, head].sort().values
            at = places[places >= 0] + 24 - length
            torch.testing.assert_close(first[0][row, head, -len(at) :], whole.keys[row, head, at])
            torch.testing.assert_close(first[1][row, head, -len(at) :], whole.values[row, head, at])


def test_rows_of_different_length_are_refused() -> None:
    model = models.shared("llama", "paged_eviction")
    cache = models.paged(model.config, budget=16, block_size=4, allocator="heads:[[1, 2], [1, 1]]")
    fed(model, cache, [24, 17])
    with pytest.raises(ValueError, match="different numbers"):
        list(cache)


def test_keys_cannot_be_assigned() -> None:
    model = models.shared("llama")
    cache = models.paged(model.config, budget=64, block_size=4)
    fed(model, cache, [24])
    for name in ("keys", "values"):
        with pytest.raises(AttributeError, match=rf"layer\.{name}.*cache\.crop\(-n\)"):
            setattr(cache.layers[0], name, torch.zeros(1))


WRITES: dict[str, Callable[[Any], None]] = {
    "values of the last slot": lambda layer: layer.values[:, :, -1].add_(3),
    "keys": lambda layer: layer.keys.mul_(2),
    "part of what was read": lambda layer: layer.keys[:, :, :4].copy_(torch.zeros(())),
    "an item": lambda layer: layer.values.__setitem__((0, 0, 0), 1.0),
    "a view of a view": lambda layer: layer.values.flatten(0, 1)[0].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("settings", [*SETTINGS.values(), {"bits": 4}], ids=[*SETTINGS, "bits"])
@pytest.mark.parametrize("inference", [False, True])
def test_whoever_writes_to_keys_is_told(
    settings: dict[str, Any], write: Callable[[Any], None], inference: bool
) -> None:
    model = models.shared("llama", "paged_eviction")
    cache = models.paged(model.config, **{"budget": 16, "block_size": 4, **settings})
    with torch.inference_mode(inference), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids, mask = fed(model, cache, [24])
        before = [layer.keys.clone() for layer in cache.layers]
        write(cache.layers[1])
        uses: list[Callable[[], Any]] = [
            lambda: modes.forward(model, cache, ids, mask, 23, 24),
            *([] if "static" in settings else [lambda: cache.crop(0)]),
            lambda: copy.deepcopy(cache),
            lambda: list(cache),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.layers[1].keys,
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match=r"1.*cache\.reset\(\).*ddp_cache_data"):
                use()
        cache.reset()
        fed(model, cache, [24])
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_keys_that_are_only_read_change_nothing() -> None:
    """What was read once and is written to later is noticed, too."""
    model = models.shared("llama")
    cache, twin = (models.paged(model.config, budget=16, block_size=4) for _ in range(2))
    ids, mask = models.left_pad(models.prompts([40]))
    for cache_of in (cache, twin):
        modes.forward(model, cache_of, ids, mask, 0, 12)
    for at in range(12, 39):
        logits = [modes.forward(model, one, ids, mask, at, at + 1) for one in (cache, twin)]
        assert torch.equal(*logits)
        for layer in cache.layers:
            assert torch.isfinite(layer.keys[:, :, : layer.held].sum() + layer.values[:, :, 0].norm())
        assert cache.layers[0].keys is cache.layers[0].keys and copy.deepcopy(cache).get_seq_length() == at + 1
    keys = cache.layers[0].keys
    modes.forward(model, cache, ids, mask, 39, 40)
    keys.zero_()
    with pytest.raises(RuntimeError, match=r"layer\.keys.*0"):
        cache.crop(-1)

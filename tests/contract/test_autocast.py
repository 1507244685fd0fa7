"""Under the caller's autocast: the model's numbers are coarser, and the cache does what it does without."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "4 bits": {"bits": 4},
    "8 bits": {"bits": 8},
    "static in bits": {"static": True, "bits": 4},
    "observing": {"policy": "h2o"},
    "in the cache": {"positions": "cache"},
    "keys in 4 bits": {"bits": (4, 8)},
    "a window of queries": {"policy": "snapkv", "heads": "separate"},
    "pyramid": {"allocator": "pyramid"},
    "ada_kv in bits": {"policy": "snapkv", "allocator": "ada_kv", "bits": 4},
    "recording": {"record_past": True},
    "static": {"static": True},
}


def said(family: str, settings: dict[str, Any] | None, autocast: tuple[bool, bool], forwards: int = 11) -> Tensor:
    """Logits of single tokens, the prompt with autocast or not, and the rest; None = `DynamicCache`."""
    model = models.shared(family, "paged_eviction")
    if settings is None:
        cache = modes.dynamic(model)
    else:
        cache = models.paged(model.config, **{"budget": 16, "block_size": 4, **settings})
    ids, mask = models.left_pad(models.prompts([32, 24]))
    steps = []
    for at, stop in [(0, 22), *((at, at + 1) for at in range(22, 32))][:forwards]:
        positions = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, at:]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast[at > 0]):
            output = model(
                ids[:, at:stop], attention_mask=mask[:, :stop], position_ids=positions, **{CACHE_ARGUMENT: cache}
            )
        steps.append(output.logits[:, -1].float())
    return torch.stack(steps)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("autocast", [(True, True), (False, True), (True, False)])
def test_it_goes_on(settings: dict[str, Any], autocast: tuple[bool, bool], family: str) -> None:
    if family == "gpt2" and ("positions" in settings or autocast != (True, True)):
        return
    expected, logits = (said(family, settings, on, forwards=7) for on in ((False, False), autocast))
    assert (logits - expected).abs().mean() < 0.25 * expected.abs().mean()


@pytest.mark.parametrize("settings", [{}, {"policy": "h2o"}, {"allocator": "pyramid"}, {"record_past": True}], ids=str)
@pytest.mark.parametrize("autocast", [(False, True), (True, False)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_same_as_dynamic(settings: dict[str, Any], autocast: tuple[bool, bool], family: str) -> None:
    """Their keys are turned in single precision, whatever autocast says."""
    expected, logits = said(family, None, autocast), said(family, {"budget": 96, **settings}, autocast)
    assert (logits - expected).abs().max() <= (0.05 if autocast[1] else 1e-5)  # eight bits of what is about 5


@pytest.mark.parametrize("settings", [*SETTINGS.values(), {"budget": "20kB"}], ids=str)
@pytest.mark.parametrize("autocast", [(False, True), (True, False)])
def test_another_type_within_a_text_is_refused(settings: dict[str, Any], autocast: tuple[bool, bool]) -> None:
    """Keys of gpt2 come in the type of autocast. Nothing that is held is converted."""
    if "positions" in settings:
        return
    said("gpt2", settings, autocast, forwards=1)
    with pytest.raises(ValueError, match=r"in one type, all of it under torch\.autocast"):
        said("gpt2", settings, autocast)


@pytest.mark.parametrize("settings", [{}, {"bits": 4}, {"bits": (4, 8)}, {"record_past": True}], ids=str)
def test_what_is_read_under_autocast(settings: dict[str, Any]) -> None:
    model = models.shared("llama", "paged_eviction")
    cache = models.paged(model.config, **{"budget": 16, "block_size": 4, **settings})
    ids, mask = models.left_pad(models.prompts([32, 24]))

    def read() -> list[Tensor]:
        states_read = [states for layer in cache.layers for states in (layer.keys, layer.values, layer.block_scores())]
        return [states.clone() for states in states_read] + [states for layer in cache for states in layer[:2]]

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at, stop in [(0, 22), *((at, at + 1) for at in range(22, 27))]:
            modes.forward(model, cache, ids, mask, at, stop)
        expected = read()
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, read(), expected))

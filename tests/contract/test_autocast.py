"""Under the caller's autocast: the model's numbers are coarser, and the cache does what it does without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "4 bits": {"bits": 4},
    "8 bits": {"bits": 8},
    "recall": {"disposal": "recall(blocks=1)", "policy": "keydiff"},
    "static in bits": {"static": True, "bits": 4},
    "observing": {"policy": "h2o"},
    "in the cache": {"positions": "cache"},
}


def said(family: str, settings: dict[str, Any], autocast: tuple[bool, bool]) -> Tensor:
    """Logits of single tokens, the prompt with autocast or not, and the rest."""
    model = models.shared(family, "paged_eviction")
    cache = models.paged(model.config, **{"budget": 16, "block_size": 4, **settings})
    ids, mask = models.left_pad(models.prompts([32, 24]))
    found = []
    for at, stop in [(0, 22), *((at, at + 1) for at in range(22, 32))]:
        positions = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, at:]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast[at > 0]):
            output = model(
                ids[:, at:stop], attention_mask=mask[:, :stop], position_ids=positions, **{CACHE_ARGUMENT: cache}
            )
        found.append(output.logits[:, -1].float())
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("autocast", [(True, True), (False, True)])
def test_it_goes_on(settings: dict[str, Any], autocast: tuple[bool, bool], family: str) -> None:
    if family == "gpt2" and "positions" in settings:
        return
    expected, found = said(family, settings, (False, False)), said(family, settings, autocast)
    assert (found - expected).abs().mean() < 0.25 * expected.abs().mean()


def test_keys_of_another_type_afterwards_are_refused() -> None:
    """Keys of gpt2 come in the type of autocast; those of llama are turned in single precision."""
    said("llama", {}, (True, False))
    with pytest.raises(ValueError, match=r"in torch\.bfloat16 and got some in torch\.float32.*under torch\.autocast"):
        said("gpt2", {}, (True, False))

"""What `verify` says of counting positions in the cache, seen on the model itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import models
from families.building import build
from families.listing import families
from hf_paged_eviction.recipes.verify import Verification
from hf_paged_eviction.recipes.verify.distances import look_at_distances


def llama(**rope: Any) -> Any:
    settings = {**models._COMMON, "max_position_embeddings": 64, "rope_scaling": {"rope_theta": 1e4, **rope}}
    return models.randomise(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings)), 0)


def pretend(model: Any, **rope: Any) -> Any:
    """The configuration now says something else than what the model was made with."""
    for name in ("rope_parameters", "rope_scaling"):
        setattr(model.config, name, {"rope_theta": 1e4, **rope})
    return model


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "gemma4", "falcon_h1"])
def test_turned_keys_are_those_of_the_model(family: str) -> None:
    if reason := models.unavailable(family):
        pytest.skip(reason)
    found = look_at_distances(models.shared(family))
    assert found.ok
    assert found.error is not None
    assert max(found.error, found.moved) < 1e-4
    assert 'positions="cache": right' in str(found)


def test_a_wrong_rotation_shows() -> None:
    model = pretend(llama(rope_type="linear", factor=4.0), rope_type="default")
    found = look_at_distances(model)
    assert not found.ok
    assert found.error > 0.1
    assert "WRONG" in str(found)
    assert not replace(Verification("", "", "", 0, 0, ()), distances=found).ok


def test_frequencies_that_were_rounded_with_the_weights_are_named() -> None:
    model = llama(rope_type="default")
    model.config.max_position_embeddings = 4096  # far away, a rounded frequency is a wrong angle
    before = str(look_at_distances(model))
    found = look_at_distances(model.to(torch.bfloat16))
    assert "rounded" not in before
    assert not found.ok
    assert "rotary frequencies were rounded to bfloat16" in str(found) and "load it with dtype=" in str(found)
    for rotary in (module for module in model.modules() if hasattr(module, "inv_freq")):
        rotary.inv_freq = torch.tensor(1e4) ** -(torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq))
    again = look_at_distances(model)
    assert again.ok and again.rounding > again.moved > 1e-3, again


def test_rotation_by_length_shows_beyond_the_window() -> None:
    """Close by it looks like any other; a configuration that does not say so would be found out."""
    model = llama(rope_type="dynamic", factor=4.0)
    assert "length of the text" in look_at_distances(model).reason
    found = look_at_distances(pretend(model, rope_type="linear", factor=1.0))
    assert not found.ok
    assert found.error > 0.1


def test_learned_positions_are_refused_with_the_reason() -> None:
    found = look_at_distances(models.shared("gpt2"))
    assert found.ok
    assert found.error is None
    assert "no layer that evicts rotates" in str(found)


@pytest.mark.parametrize(
    ("name", "reason"), [("recurrent_gemma", "no layer of this model evicts"), ("diffusion_gemma-image", "by itself")]
)
def test_what_holds_no_blocks_is_not_looked_at(name: str, reason: str) -> None:
    """Moving the text moves their logits, which is nothing that a cache could do wrong."""
    family = next((family for family in families() if str(family) == name), None)
    if family is None:
        pytest.skip("not in this version of transformers")
    found = look_at_distances(build(family))
    assert found.ok and reason in str(found)

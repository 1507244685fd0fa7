"""Whether positions may be counted in the cache, seen on the model itself."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import models
from families.building import build
from families.listing import families
from rotation_checks import look, look_at_positions


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
    seen = look_at_positions(models.shared(family))
    assert seen.ok and seen.error < 1e-4
    assert 'positions="cache": right' in seen.text


def test_a_wrong_rotation_shows() -> None:
    seen = look_at_positions(pretend(llama(rope_type="linear", factor=4.0), rope_type="default"))
    assert not seen.ok and seen.error > 0.1
    assert "WRONG" in seen.text


def test_frequencies_that_were_rounded_with_the_weights_are_named() -> None:
    model = llama(rope_type="default")
    model.config.max_position_embeddings = 4096  # far away, a rounded frequency is a wrong angle
    assert "rounded" not in look_at_positions(model).text
    seen = look_at_positions(model.to(torch.bfloat16))
    assert not seen.ok
    assert "rotary frequencies were rounded to bfloat16" in seen.text and "dtype=" in seen.text
    for rotary in (module for module in model.modules() if hasattr(module, "inv_freq")):
        rotary.inv_freq = torch.tensor(1e4) ** -(torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq))
    again = look_at_positions(model)
    assert again.ok and again.error > 1e-3, again


def test_rotation_by_length_shows_beyond_the_window() -> None:
    """Close by it looks like any other; a configuration that does not say so would be found out."""
    model = llama(rope_type="dynamic", factor=4.0)
    assert "length of the text" in look(model)[1].text
    seen = look_at_positions(pretend(model, rope_type="linear", factor=1.0))
    assert not seen.ok and seen.error > 0.1


def test_learned_positions_are_refused_with_the_reason() -> None:
    seen = look(models.shared("gpt2"))[1]
    assert seen.ok and seen.error is None
    assert "no layer that evicts rotates" in seen.text


@pytest.mark.parametrize(
    ("name", "reason"), [("recurrent_gemma", "no layer of this model evicts"), ("diffusion_gemma-image", "by itself")]
)
def test_what_holds_no_blocks_is_not_looked_at(name: str, reason: str) -> None:
    """Moving the text moves their logits, which is nothing that a cache could do wrong."""
    family = next((family for family in families() if str(family) == name), None)
    if family is None:
        pytest.skip("not in this version of transformers")
    seen = look(build(family))[1]
    assert seen.ok and reason in seen.text

"""Tokens of an image see each other: a mask that is the model's own, in every turn that brings one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import models
import modes
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.contract
IMAGE, BEGIN, END = 290, 291, 292


def build() -> Any:
    torch.manual_seed(0)
    text: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "sliding_window": 8,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "initializer_range": 0.3,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "num_channels": 3,
    }
    ids = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    config._attn_implementation = "paged_eviction"
    return Gemma3ForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


def turn(seed: int) -> Tensor:
    before, after = models.prompts([7, 6], seed)
    return torch.cat([before, torch.tensor([BEGIN, *[IMAGE] * 4, END]), after])[None]


def expected(model: Any, turns: int) -> list[int]:
    """The answers with `DynamicCache`; skips where the release itself cannot read a second image (5.14.1)."""
    try:
        return say(model, modes.dynamic(model), turns)
    except RuntimeError as error:
        if turns == 1:
            raise
        pytest.skip(f"transformers {models.VERSION}: DynamicCache itself fails at a second image: {error}")


def say(model: Any, cache: Any, turns: int) -> list[int]:
    ids = torch.zeros(1, 0, dtype=torch.long)
    for number in range(turns):
        ids = torch.cat([ids, turn(number)], dim=1)
        pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(number))
        settings = {CACHE_ARGUMENT: cache, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        inputs = {
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": (ids == IMAGE).long(),
            "pixel_values": pixels,
        }
        ids = model.generate(ids, suppress_tokens=[IMAGE, BEGIN, END], **inputs, **settings)
    return ids[0].tolist()


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("options", [{}, {"policy": "h2o"}, {"policy": "snapkv", "heads": "separate"}], ids=str)
def test_images_in_every_turn(model: Any, options: dict[str, Any], turns: int) -> None:
    right = expected(model, turns)
    assert say(model, models.paged(model.config, budget=96, **options), turns) == right


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 96, "allocator": "pyramid"},
        {"budget": 16, "allocator": "pyramid"},
        {"budget": 96, "policy": "snapkv", "allocator": "ada_kv"},
        {"budget": 96, "policy": "snapkv", "allocator": "cake"},
        {"budget": 112, "allocator": "heads:[[96], [128]]", "heads": "shared"},
    ],
    ids=str,
)
def test_an_image_after_the_first_turn_needs_equal_budgets(model: Any, options: dict[str, Any]) -> None:
    settings = {"block_size": 4, **options}
    if options["budget"] != 16:
        assert say(model, models.paged(model.config, **settings), 1) == expected(model, 1)  # the way out
    expected(model, 2)
    with pytest.raises(ValueError, match="allocator='uniform'"):
        say(model, models.paged(model.config, **settings), 2)

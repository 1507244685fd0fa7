"""Models that remember how the positions of their last text were numbered: whoever calls them begins as with a new one.

Models that read images do so (`rope_deltas`), and `generate` sets that when it begins a text.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import modes
from families.building import build
from families.listing import families
from hf_paged_eviction import PagedEvictionCache, ask, compress_by_probe, verify
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.feeding import feed
from hf_paged_eviction.integration.kept_state import aside

BY_NAME = {str(family): family for family in families()}
NAMES = [
    name
    for name in ("qwen2_vl-image", "qwen2_5_vl-image", "qwen3_vl-image", "glm4v-image", "hunyuan_vl-image")
    if name in BY_NAME
]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


class Letters:
    """A tokenizer of which each letter is a token."""

    eos_token_id = None
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: Tensor, **_: Any) -> str:
        return " ".join(map(str, ids.tolist()))


def remembering(model: Any, deltas: Tensor) -> list[Any]:
    """Let the model remember a text whose positions are other than its columns; the modules that do."""
    modules = [module for module in model.modules() if "rope_deltas" in vars(module)]
    for module in modules:
        module.rope_deltas = deltas
    return modules


#: As after an image, and after an image in one of two rows.
REMEMBERED = [torch.tensor([[-12]]), torch.tensor([[-12], [3]])]


@pytest.mark.parametrize("deltas", REMEMBERED, ids=["one row", "two rows"])
@pytest.mark.parametrize("name", NAMES)
def test_ask_begins_anew(name: str, deltas: Tensor) -> None:
    """And leaves what a chat remembers as it was."""
    model = build(BY_NAME[name])

    def answers() -> Any:
        options: dict[str, Any] = {"policy": "keydiff", "max_new_tokens": 6, "chunk_size": 16}
        return ask(model, Letters(), "the sea is wide " * 6, ["Why? ", "Who?"], 128, **options, do_sample=False)

    expected = answers()
    modules = remembering(model, deltas)
    assert modules
    assert answers() == expected
    assert all(module.rope_deltas is deltas for module in modules)


@pytest.mark.parametrize("deltas", REMEMBERED, ids=["one row", "two rows"])
@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_was_read_goes_on_by_generate(name: str, deltas: Tensor) -> None:
    model = build(BY_NAME[name])
    ids = torch.arange(40, 100)[None]

    def answer(mask: Tensor | None) -> list[int]:
        cache = PagedEvictionCache(model.config, budget=128, policy="keydiff")
        for start in (0, 20):
            feed(model, ids[:, start : start + 20], None if mask is None else mask[:, : start + 20], cache)
        question = cache.follow_up(ids[:, 40:])
        output: Tensor = model.generate(**question, **{CACHE_ARGUMENT: cache}, max_new_tokens=6, **GREEDY)
        return output[0, 60:].tolist()

    with torch.no_grad():
        ones = torch.ones_like(ids)
        expected = model.generate(ids, attention_mask=ones, max_new_tokens=6, **GREEDY)[0, 60:].tolist()
        for mask in (None, ones):
            remembering(model, deltas)
            assert answer(mask) == expected


def test_a_probe_begins_anew() -> None:
    model = build(BY_NAME["qwen2_5_vl-image"])
    model.set_attn_implementation("paged_eviction")
    ids = torch.arange(40, 104)[None]
    answers = []
    for deltas in (None, *REMEMBERED):
        if deltas is not None:
            remembering(model, deltas)
        cache = PagedEvictionCache(model.config, budget=64, block_size=4, policy="kvzip")
        compress_by_probe(model, cache, 32, ids, probe_ids=[7, 8], chunk_size=32)
        question = cache.follow_up(ids[:, :3])
        answers.append(
            model.generate(**question, **{CACHE_ARGUMENT: cache}, max_new_tokens=6, **GREEDY)[0, -6:].tolist()
        )
    assert answers[1:] == answers[:1] * 2


def test_verify_begins_anew() -> None:
    model = build(BY_NAME["qwen2_5_vl-image"])
    expected = str(verify(model, thorough=False))
    modules = remembering(model, REMEMBERED[1])
    assert str(verify(model, thorough=False)) == expected
    assert modules[0].rope_deltas is REMEMBERED[1]


def test_placeholders_in_a_text_are_what_generate_makes_of_them() -> None:
    model = build(BY_NAME["qwen2_5_vl-image"])
    image = chr(model.config.image_token_id)
    text, question = f"the {image}{image} sea is wide " * 3, "Why? "
    ids = torch.tensor([Letters()(f"{text}\n\n{question}")["input_ids"]])
    with torch.no_grad():
        expected = model.generate(ids, **{CACHE_ARGUMENT: modes.dynamic(model)}, max_new_tokens=6, **GREEDY)
    remembering(model, REMEMBERED[0])
    answer = ask(model, Letters(), text, question, 256, "keydiff", max_new_tokens=6, chunk_size=16, do_sample=False)
    assert answer == Letters().decode(expected[0, ids.shape[1] :])


def test_images_are_not_asked_about() -> None:
    model = build(BY_NAME["qwen2_5_vl-image"])
    with pytest.raises(ValueError, match=r"image_grid_thw, pixel_values.*generate"):
        ask(
            model,
            Letters(),
            "the sea",
            "Why?",
            64,
            "keydiff",
            pixel_values=torch.zeros(4, 1176),
            image_grid_thw=torch.tensor([[1, 2, 2]]),
        )


def test_a_model_with_a_recurrent_state_of_its_own_is_refused() -> None:
    model = build(BY_NAME["recurrent_gemma"])
    with pytest.raises(ValueError, match="recurrent state"):
        ask(model, Letters(), "the sea is wide", "Why?", 64, "keydiff")


def test_what_was_remembered_comes_back_after_an_error() -> None:
    model = build(BY_NAME["qwen2_5_vl-image"])
    (module, *_) = remembering(model, REMEMBERED[0])
    with pytest.raises(KeyError), aside(model):
        assert module.rope_deltas is None
        raise KeyError
    assert module.rope_deltas is REMEMBERED[0]

"""`generate` with a cache that has read a text, and ids of another: refused where they are too few to go on from it."""

from typing import Any

import pytest
import torch
from transformers import pipeline

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.feeding import feed

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(models.VERSION < (5, 19), reason="generate tells no cache that it begins"),
]
REFUSED = r"a text of \d+ tokens, and this cache has seen \d+.*call for each batch.*follow_up.*crop\(-1\)"


def say(model: Any, cache: Any, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    return model.generate(ids, **{CACHE_ARGUMENT: cache, "do_sample": False, "max_new_tokens": 6, **settings})


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 5}], ids=str)
@pytest.mark.parametrize("options", [{"budget": 96}, {"budget": 16, "block_size": 4, "policy": "keydiff"}], ids=str)
@pytest.mark.parametrize("length", [3, 20, 24])
def test_another_prompt_is_refused(length: int, options: dict[str, Any], settings: dict[str, Any]) -> None:
    model = models.shared("llama")
    first, other = models.prompts([20, length], seed=3)
    cache = models.paged(model.config, **options)
    sequence = say(model, cache, first[None])
    with pytest.raises(ValueError, match=REFUSED):
        say(model, cache, other[None], **settings)
    assert say(model, cache, sequence, **settings).shape[1] > sequence.shape[1]  # nothing was touched
    cache.reset()
    assert say(model, cache, other[None], **settings).shape[1] > length


def test_a_text_that_was_read_whole() -> None:
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([20, 9]))
    cache = models.paged(model.config, budget=96, block_size=16)
    with torch.no_grad():
        feed(model, ids, mask, cache)
    with pytest.raises(ValueError, match=REFUSED):
        say(model, cache, ids, attention_mask=mask)
    cache.crop(-1)
    expected = say(model, modes.dynamic(model), ids, attention_mask=mask)
    assert say(model, cache, ids, attention_mask=mask).tolist() == expected.tolist()


def test_embeddings_of_another_text() -> None:
    model = models.shared("llama")
    cache = models.paged(model.config, budget=96)
    embedded = model.get_input_embeddings()(torch.stack(models.prompts([20])))
    settings = {CACHE_ARGUMENT: cache, "max_new_tokens": 6, "attention_mask": torch.ones(1, 20, dtype=torch.long)}
    model.generate(inputs_embeds=embedded, **settings)
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(inputs_embeds=embedded, **settings)


def test_new_tokens_with_a_mask_of_the_whole_go_on() -> None:
    model = models.shared("llama")
    first, new = models.prompts([20, 5])
    caches = models.paged(model.config, budget=96), modes.dynamic(model)
    sequences = [say(model, cache, first[None]) for cache in caches]
    both = [torch.cat([sequence, new[None]], dim=1) for sequence in sequences]
    mask = torch.ones_like(both[0])
    shown = [say(model, cache, ids[:, 25:], attention_mask=mask) for cache, ids in zip(caches, both, strict=True)]
    assert shown[0].tolist() == shown[1].tolist()


@pytest.mark.parametrize("chats", [False, True], ids=["texts", "chats"])
def test_a_pipeline_with_a_list(chats: bool) -> None:
    embedded = pytest.importorskip("hf_paged_eviction_eval.embedded")
    model, tokenizer = embedded.load()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["The first text, of a few words.", "Another one, of as many as that."]
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in texts] if chats else texts
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}

    def cache() -> PagedEvictionCache:
        return PagedEvictionCache(model.config, budget=96, policy="keydiff")

    with pytest.raises(ValueError, match=REFUSED):
        pipe(prompts, **{CACHE_ARGUMENT: cache()}, **settings)
    alone = [pipe(prompt, **{CACHE_ARGUMENT: cache()}, **settings) for prompt in prompts]
    assert pipe(prompts, batch_size=2, **{CACHE_ARGUMENT: cache()}, **settings) == alone

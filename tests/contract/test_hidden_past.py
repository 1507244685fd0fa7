"""A later mask hides tokens of the past: gone from then on, in their row alone; shown again, they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT


def chat(model: Any, cache: Any) -> tuple[Tensor, list[list[int]]]:
    """Two rows, of which the first ends early and is filled up with pads; the next turn's mask hides these.

    Returns:
        The text before the second answer, and both rows of that.
    """
    prompt, more = torch.stack(models.prompts([9, 9], seed=3)), torch.stack(models.prompts([5, 5], seed=9))
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": models.PAD, "max_new_tokens": 8}
    ones = torch.ones_like(prompt)
    end = int(model.generate(prompt, attention_mask=ones, **settings)[0, 11])
    sequences = model.generate(prompt, attention_mask=ones, **{CACHE_ARGUMENT: cache}, eos_token_id=end, **settings)
    ids = torch.cat([sequences, more], dim=1)
    output = model.generate(ids, attention_mask=(ids != models.PAD).long(), **{CACHE_ARGUMENT: cache}, **settings)
    return ids, output[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged_eviction"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_chat_of_two_rows(family: str, attention: str, static: bool) -> None:
    model = models.shared(family, attention)
    ids, expected = chat(model, modes.dynamic(model))
    assert (ids[0] == models.PAD).any()
    cache = PagedEvictionCache(model.config, budget=256, static=static)
    assert chat(model, cache)[1] == expected
    hidden = int((ids[:, :16] == models.PAD).sum())  # the last token of an answer comes with the next turn
    assert cache.stats().evicted_tokens == hidden * len(cache.paged_layers)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("mode", ["beams", "chunks", "sampled"])
def test_a_turn_in_every_mode(mode: str, family: str) -> None:
    """Behind a hidden end of one row and hidden tokens in the middle of both."""
    model = models.shared(family)
    ids = torch.stack(models.prompts([30, 30], seed=6))
    mask = torch.ones_like(ids)
    mask[:, 6:9] = mask[0, 15:20] = 0
    settings = {
        "beams": {"num_beams": 3},
        "chunks": {"prefill_chunk_size": 3},
        "sampled": {"do_sample": True},
    }[mode]
    sequences = []
    for cache in (PagedEvictionCache(model.config, budget=128), modes.dynamic(model)):
        modes.forward(model, cache, ids, torch.ones_like(ids), 0, 20)
        if mode == "beams":
            cache.batch_repeat_interleave(3)
        torch.manual_seed(0)
        part = {"attention_mask": mask, CACHE_ARGUMENT: cache, "max_new_tokens": 12, "pad_token_id": models.PAD}
        sequences.append(model.generate(ids, **{"do_sample": False, **part, **settings}).tolist())
    assert sequences[0] == sequences[1]


def test_what_is_hidden_stays_hidden() -> None:
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([12, 20]))
    cache = PagedEvictionCache(model.config, budget=64)
    modes.forward(model, cache, ids, mask, 0, 16)
    held = cache.paged_layers[0][1].positions.tolist()
    shown = torch.ones_like(mask)
    with pytest.raises(ValueError, match=r"shows 8.*0"):
        modes.forward(model, cache, ids, shown, 16, 20)
    with torch.no_grad(), pytest.raises(ValueError, match="without a mask"):
        model(ids[:, 16:], **{CACHE_ARGUMENT: cache})
    assert cache.paged_layers[0][1].positions.tolist() == held
    mask[1, 3] = 0
    modes.forward(model, cache, ids, mask, 16, 18)
    mask[1, 3] = 1
    with pytest.raises(ValueError, match="1, column 3"):
        modes.forward(model, cache, ids, mask, 18, 20)


def test_follow_up_says_what_was_no_token() -> None:
    model = models.shared("llama")
    prompt, more = torch.stack(models.prompts([9, 9], seed=3)), torch.stack(models.prompts([5, 5], seed=9))
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": models.PAD, "max_new_tokens": 8}
    ones = torch.ones_like(prompt)
    end = int(model.generate(prompt, attention_mask=ones, **settings)[0, 11])
    cache = PagedEvictionCache(model.config, budget=256)
    sequences = model.generate(prompt, attention_mask=ones, **{CACHE_ARGUMENT: cache}, eos_token_id=end, **settings)
    # The last token of an answer has not been fed: it comes with the next turn.
    seen = cache.get_seq_length()
    new = torch.cat([sequences[:, seen:], more], dim=1)
    mask = (torch.cat([sequences, more], dim=1) != models.PAD).long()
    inputs = cache.follow_up(new, mask)
    assert inputs["attention_mask"].tolist() == mask.tolist()
    assert cache.stats().evicted_tokens == int((mask[:, :seen] == 0).sum()) * len(cache.paged_layers)
    answer = model.generate(**inputs, **{CACHE_ARGUMENT: cache}, **settings)[:, -8:]
    for row in range(2):
        alone = torch.cat([sequences[row], more[row]])
        alone = alone[alone != models.PAD][None]
        expected = model.generate(alone, attention_mask=torch.ones_like(alone), **settings)
        assert answer[row].tolist() == expected[0, -8:].tolist()
    with pytest.raises(ValueError, match="attention_mask the same"):
        cache.follow_up(new, mask[:, 1:])


@pytest.mark.parametrize("count", [1, 4])
def test_a_4d_mask_after_an_eviction(count: int) -> None:
    model = models.shared("llama")
    ids = models.prompts([40])[0][None]
    for budget, refused in ((64, False), (16, True)):
        cache = PagedEvictionCache(model.config, budget=budget, block_size=4)
        modes.forward(model, cache, ids, torch.ones_like(ids), 0, 30)
        mask = torch.ones(1, 1, count, 30 + count, dtype=torch.bool).tril(30)
        settings = {"attention_mask": mask, "position_ids": torch.arange(30, 30 + count)[None]}
        with torch.no_grad():
            if refused:
                with pytest.raises(ValueError, match=r"4-D.*Pass.*2-D"):
                    model(ids[:, 30 : 30 + count], **{CACHE_ARGUMENT: cache}, **settings)
            else:
                model(ids[:, 30 : 30 + count], **{CACHE_ARGUMENT: cache}, **settings)

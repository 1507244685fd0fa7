"""A later mask hides tokens of the past: gone from then on, in their row alone; shown again, they are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

ANSWER: dict[str, Any] = {"do_sample": False, "pad_token_id": models.PAD, "max_new_tokens": 8}


def first_turn(model: Any, cache: Any) -> tuple[Tensor, Tensor]:
    """Two rows, of which the first ends early and is filled up with pads, and what is asked next."""
    prompt, more = torch.stack(models.prompts([9, 9], seed=3)), torch.stack(models.prompts([5, 5], seed=9))
    ones = torch.ones_like(prompt)
    end = int(model.generate(prompt, attention_mask=ones, **ANSWER)[0, 11])
    return model.generate(prompt, attention_mask=ones, **{CACHE_ARGUMENT: cache}, eos_token_id=end, **ANSWER), more


def chat(model: Any, cache: Any) -> tuple[Tensor, list[list[int]]]:
    """The text before a second answer, whose mask hides the pads of the first, and both rows of that answer."""
    ids = torch.cat(first_turn(model, cache), dim=1)
    output = model.generate(ids, attention_mask=(ids != models.PAD).long(), **{CACHE_ARGUMENT: cache}, **ANSWER)
    return ids, output[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged_eviction"])
@pytest.mark.parametrize(("family", "static"), [("llama", False), ("llama", True), ("gemma3", False)])
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
    settings = {"beams": {"num_beams": 3}, "chunks": {"prefill_chunk_size": 3}, "sampled": {"do_sample": True}}[mode]
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
    cache = PagedEvictionCache(model.config, budget=256)
    sequences, more = first_turn(model, cache)
    # The last token of an answer has not been fed: it comes with the next turn.
    seen = cache.get_seq_length()
    new = torch.cat([sequences[:, seen:], more], dim=1)
    mask = (torch.cat([sequences, more], dim=1) != models.PAD).long()
    inputs = cache.follow_up(new, mask)
    assert inputs["attention_mask"].tolist() == mask.tolist()
    assert cache.stats().evicted_tokens == int((mask[:, :seen] == 0).sum()) * len(cache.paged_layers)
    answer = model.generate(**inputs, **{CACHE_ARGUMENT: cache}, **ANSWER)[:, -8:]
    for row in range(2):
        alone = torch.cat([sequences[row], more[row]])
        alone = alone[alone != models.PAD][None]
        expected = model.generate(alone, attention_mask=torch.ones_like(alone), **ANSWER)
        assert answer[row].tolist() == expected[0, -8:].tolist()
    with pytest.raises(ValueError, match="attention_mask the same"):
        cache.follow_up(new, mask[:, 1:])


KINDS: list[dict[str, Any]] = [
    {},
    {"policy": "h2o"},
    {"heads": "separate"},
    {"bits": 8},
    {"static": True},
    {"positions": "cache"},
]


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("count", [1, 4])
def test_a_4d_mask_after_an_eviction(count: int, settings: dict[str, Any]) -> None:
    model = models.shared("llama", "paged_eviction")
    ids = models.prompts([40])[0][None]
    for budget, refused in ((64, False), (20, True)):
        if settings.get("static") and not refused:
            continue  # its masks have a column for each slot
        cache = PagedEvictionCache(model.config, budget=budget, block_size=4, **settings)
        modes.forward(model, cache, ids, torch.ones_like(ids), 0, 30)
        mask = torch.ones(1, 1, count, 30 + count, dtype=torch.bool).tril(30)
        inputs = {"attention_mask": mask, "position_ids": torch.arange(30, 30 + count)[None], CACHE_ARGUMENT: cache}
        with torch.no_grad():
            if refused:
                with pytest.raises(ValueError, match=r"4-D.*2-D"):
                    model(ids[:, 30 : 30 + count], **inputs)
            else:
                model(ids[:, 30 : 30 + count], **inputs)


#: What takes away all that was hidden, and the rows that remain.
LEAVING: dict[str, tuple[Callable[[PagedEvictionCache], Any], list[int]]] = {
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "select by bools": (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    "crop": (lambda cache: cache.crop(-4), [0, 1]),
}


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged_eviction"])
@pytest.mark.parametrize(("budget", "static"), [(64, False), (64, True), (16, False)])
def test_what_was_hidden_leaves_with_its_row(how: str, attention: str, budget: int, static: bool) -> None:
    """What stays goes on with no mask, and with one of ones, as a cache that saw nothing else."""
    if how == "crop" and budget < 64:
        pytest.skip("evicted tokens cannot be taken back")
    model, (leave, rows) = models.shared("llama", attention), LEAVING[how]
    ids = torch.stack(models.prompts([28, 28], seed=4))
    before, hidden = torch.ones_like(ids), torch.ones_like(ids)
    hidden[0, 16:18] = 0
    if how != "crop":
        before[0, :5] = hidden[0, :5] = 0
    settings = {"budget": budget, "block_size": 4, "policy": "recency", "static": static}
    cache, alone = (PagedEvictionCache(model.config, **settings) for _ in range(2))
    modes.forward(model, cache, ids, before, 0, 18)
    modes.forward(model, cache, ids, hidden, 18, 20)
    leave(cache)
    kept, seen = ids[rows], cache.get_seq_length()
    for start, stop in ((0, min(seen, 18)), (18, seen)):
        if start < stop:
            modes.forward(model, alone, kept, torch.ones_like(kept), start, stop)
    answers = []
    for each in (cache, alone):
        positions = torch.arange(seen, 24).expand(len(rows), -1)
        arguments = {"position_ids": positions, CACHE_ARGUMENT: each, "use_cache": True}
        with torch.no_grad():
            logits = model(kept[:, seen:24], **arguments).logits
            part = {"attention_mask": torch.ones_like(kept), CACHE_ARGUMENT: each, "do_sample": False}
            tokens = model.generate(kept, **part, max_new_tokens=6, pad_token_id=models.PAD)
        answers.append((logits, tokens.tolist()))
    assert answers[0][1] == answers[1][1]
    torch.testing.assert_close(answers[0][0], answers[1][0], rtol=1e-4, atol=1e-4)


def test_a_row_that_keeps_its_pads_is_still_asked_for_them(tmp_path: Path) -> None:
    """Also after a file was made of it; and without them, the file has none."""
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([12, 20]))
    for row, padded in ((0, True), (1, False)):
        cache = PagedEvictionCache(model.config, budget=64)
        modes.forward(model, cache, ids, mask, 0, 16)
        cache.batch_select_indices(torch.tensor([row]))
        cache.save(tmp_path / "row.safetensors", ids[[row]])
        for each in (cache, PagedEvictionCache.load(tmp_path / "row.safetensors", model.config)):
            arguments = {CACHE_ARGUMENT: each, "position_ids": torch.arange(16, 20)[None]}
            if padded:
                with torch.no_grad(), pytest.raises(ValueError, match="without a mask"):
                    model(ids[[row], 16:], **arguments)
            else:
                with torch.no_grad():
                    model(ids[[row], 16:], **arguments)
                assert each.get_seq_length() == 20

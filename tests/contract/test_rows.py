"""Promise 3: a left-padded row gives what the same row gives alone, at every budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from rows import STEPS, compare

pytestmark = pytest.mark.contract

BUILT_IN = ("key_norm", "keydiff", "paged_eviction", "random", "recency", "streaming_llm", "value_norm")
LENGTHS = [40, 33, 9, 1]


@pytest.mark.parametrize("budget", [12, 24, 52])
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_policy(policy: str, heads: str, budget: int) -> None:
    model = models.shared("llama")
    assert compare(model, LENGTHS, budget=budget, block_size=4, policy=policy, heads=heads) > 0


@pytest.mark.parametrize("budget", range(12, 76, 8))
def test_every_budget(budget: int) -> None:
    evicted = compare(models.shared("llama", "eager"), LENGTHS, budget=budget, block_size=4)
    assert (evicted > 0) == (budget < LENGTHS[0] + STEPS)


@pytest.mark.parametrize("budget", [12, 24, 52, 100])
@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff", "recency"])
@pytest.mark.parametrize("turns", [[10, 2, 6, 3], [2, 17, 40, 5]], ids=str)
def test_ragged_second_turn(policy: str, budget: int, turns: list[int]) -> None:
    """The second turn is left-padded in the middle of the text."""
    compare(models.shared("llama"), LENGTHS, turns, budget=budget, block_size=4, policy=policy)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_neox", "phi3", "gpt_oss", "llama4", "deepseek_v3", "lfm2"])
def test_family(family: str) -> None:
    if reason := models.unavailable(family) or models.recurrence_differs(family, "direct", True):
        pytest.skip(reason)
    policy = "keydiff" if family == "deepseek_v3" else "paged_eviction"
    assert compare(models.shared(family), [40, 29, 9], budget=24, block_size=4, policy=policy) > 0


def test_gpt2_learned_positions() -> None:
    assert compare(models.shared("gpt2"), LENGTHS, budget=24, block_size=4) > 0


@pytest.mark.parametrize("policy", ["paged_eviction", "keydiff"])
def test_repeated_tokens(policy: str) -> None:
    """Exactly tied scores: only a total order of the candidates makes a row independent of its batch."""
    model = models.shared("llama")
    settings: dict[str, Any] = {"budget": 24, "block_size": 4, "policy": policy}
    lengths = [60, 41, 13]
    ids, mask = models.left_pad([torch.full((length,), 7) for length in lengths])
    cache = PagedEvictionCache(model.config, **settings)
    together = modes.generate(model, cache, ids, mask, 30)[:, ids.shape[1] :]
    for row, length in enumerate(lengths):
        own = PagedEvictionCache(model.config, **settings)
        alone = modes.generate(model, own, torch.full((1, length), 7), torch.ones(1, length, dtype=torch.long), 30)
        assert alone[0, length:].tolist() == together[row].tolist()


@pytest.mark.parametrize("width", [40, 41, 64, 150])
def test_a_row_that_is_all_padding_but_one_token(width: int) -> None:
    """More pads than the whole budget, also."""
    model = models.shared("llama")
    rows = models.prompts([1, 9])
    ids, mask = models.left_pad(rows, width)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4)
    together = modes.generate(model, cache, ids, mask, 40)[:, width:]
    for row in range(2):
        own = PagedEvictionCache(model.config, budget=24, block_size=4)
        alone = modes.generate(model, own, rows[row][None], torch.ones(1, len(rows[row]), dtype=torch.long), 40)
        assert alone[0, len(rows[row]) :].tolist() == together[row].tolist()


@pytest.mark.parametrize("explicit", [False, True], ids=["learned", "given"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "return_sequences"])
def test_a_given_mask_is_the_learned_one(mode: str, explicit: bool) -> None:
    """Also where generate expands the batch: rows are repeated in place."""
    model = models.shared("llama")
    ids, mask = modes.batch(mode, padded=True)
    caches = [
        PagedEvictionCache(model.config, budget=24, block_size=4, attention_mask=given)
        for given in (None, mask if explicit else mask.bool())
    ]
    tokens = [modes.run(model, cache, mode, ids, mask).tolist() for cache in caches]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("budget", [16, 24])
def test_a_lone_pad_evicts_nothing(budget: int) -> None:
    """One column in which one row pauses: that row goes on as if the column had not been."""
    model = models.shared("llama")
    rows = models.prompts([20, 30], seed=2)
    forced = torch.stack(models.prompts([20, 20], seed=6))
    ids, mask = models.left_pad(rows)
    cache = PagedEvictionCache(model.config, budget=budget, block_size=4)
    modes.forward(model, cache, ids, mask, 0, ids.shape[1])
    fed = 0
    last = None
    for step in range(20):
        pause = step in (3, 4, 11)
        column = forced[:, step : step + 1].clone()
        if pause:
            column[0] = models.PAD
        real = torch.tensor([[0 if pause else 1], [1]])
        ids, mask = torch.cat([ids, column], dim=1), torch.cat([mask, real], dim=1)
        logits = modes.forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])
        if not pause:
            fed, last = fed + 1, logits[0, -1]
    alone = PagedEvictionCache(model.config, budget=budget, block_size=4)
    own = rows[0][None]
    kept_steps = [step for step in range(20) if step not in (3, 4, 11)]
    text = torch.cat([own, forced[:1, kept_steps]], dim=1)
    ones = torch.ones_like(text)
    logits = modes.forward(model, alone, text, ones, 0, own.shape[1])
    for at in range(own.shape[1], text.shape[1]):
        logits = modes.forward(model, alone, text, ones, at, at + 1)
    assert fed == len(kept_steps)
    held, own_held = cache.layers[0].positions[0, 0], alone.layers[0].positions[0, 0]
    assert sorted(p for p in held.tolist() if p >= 0) == sorted(own_held.tolist())
    assert last is not None
    assert_close(last, logits[0, -1])


@pytest.mark.parametrize("budget", [12, 24, 100])
def test_right_padding_in_a_direct_call(budget: int) -> None:
    """Right-padded prompts, then tokens one at a time: pads in the middle of the text."""
    model = models.shared("llama")
    lengths = [30, 18, 5]
    rows = models.prompts(lengths, seed=7)
    forced = torch.stack(models.prompts([16] * 3, seed=8))
    ids, mask = torch.full((3, 30), models.PAD), torch.zeros(3, 30, dtype=torch.long)
    for row, own in enumerate(rows):
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    cache = PagedEvictionCache(model.config, budget=budget, block_size=4)
    modes.forward(model, cache, ids, mask, 0, 30)
    for step in range(16):
        ids, mask = torch.cat([ids, forced[:, step : step + 1]], dim=1), modes.extend(mask, 1)
        logits = modes.forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])
    for row, own_row in enumerate(rows):
        alone = PagedEvictionCache(model.config, budget=budget, block_size=4)
        text = torch.cat([own_row, forced[row]])[None]
        ones = torch.ones_like(text)
        own_logits = modes.forward(model, alone, text, ones, 0, len(own_row))
        for at in range(len(own_row), text.shape[1]):
            own_logits = modes.forward(model, alone, text, ones, at, at + 1)
        assert_close(logits[row, -1], own_logits[0, -1], f"row {row}")

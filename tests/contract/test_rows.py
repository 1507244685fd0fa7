"""Promise 3: a left-padded row gives what the same row gives alone, at every budget."""

from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from rows import compare

pytestmark = pytest.mark.contract

LENGTHS = [40, 33, 12, 1]


@pytest.mark.parametrize(("budget", "policy"), [(12, "paged_eviction"), (24, "keydiff"), (52, "value_norm")])
@pytest.mark.parametrize("turns", [[10, 2, 6, 3], [2, 17, 40, 5]], ids=str)
def test_ragged_second_turn(policy: str, budget: int, turns: list[int]) -> None:
    """The second turn is left-padded in the middle of the text."""
    compare(models.shared("llama"), LENGTHS, turns, budget=budget, block_size=4, policy=policy)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4", "qwen3"])
def test_family(family: str) -> None:
    """The others, and policies, are drawn, see tests/fuzz."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    assert compare(models.shared(family), [40, 29, 12], budget=24, block_size=4, policy="paged_eviction") > 0


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
    together = modes.generate(model, cache, ids, mask, 16)[:, ids.shape[1] :]
    for row, length in enumerate(lengths):
        own = PagedEvictionCache(model.config, **settings)
        alone = modes.generate(model, own, torch.full((1, length), 7), torch.ones(1, length, dtype=torch.long), 16)
        assert alone[0, length:].tolist() == together[row].tolist()


@pytest.mark.parametrize("width", [40, 150])
def test_a_row_that_is_all_padding_but_one_token(width: int) -> None:
    """More pads than the whole budget, also."""
    model = models.shared("llama")
    rows = models.prompts([1, 9])
    ids, mask = models.left_pad(rows, width)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4)
    together = modes.generate(model, cache, ids, mask, 28)[:, width:]
    for row in range(2):
        own = PagedEvictionCache(model.config, budget=24, block_size=4)
        alone = modes.generate(model, own, rows[row][None], torch.ones(1, len(rows[row]), dtype=torch.long), 28)
        assert alone[0, len(rows[row]) :].tolist() == together[row].tolist()


@pytest.mark.parametrize("explicit", [False, True], ids=["learned", "given"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "return_sequences"])
def test_a_given_mask_is_the_learned_one(mode: str, explicit: bool) -> None:
    """Also where generate expands the batch: rows are repeated in place."""
    model = models.shared("llama")
    ids, mask = modes.batch(mode, padded=True)
    caches = [
        PagedEvictionCache(model.config, budget=24, block_size=4, attention_mask=given_mask)
        for given_mask in (None, mask if explicit else mask.bool())
    ]
    tokens = [modes.run(model, cache, mode, ids, mask).tolist() for cache in caches]
    assert tokens[0] == tokens[1]

"""Turns that leave pads in the middle of the text, and caches that are used again."""

import pytest
import torch
from torch import Tensor

import models
import modes
from evicting import exact

pytestmark = pytest.mark.contract


def ragged_turns(model: object, cache: object, count: int = 3) -> Tensor:
    """Each turn's user text is left-padded on its own, behind what was said before."""
    ids, mask = models.left_pad(models.prompts([21, 13, 5]))
    answers = []
    for turn in range(count):
        if turn:
            more, real = models.left_pad(models.prompts([[9, 2, 5], [3, 11, 4]][turn - 1], seed=turn))
            ids, mask = torch.cat([ids, more], dim=1), torch.cat([mask, real], dim=1)
        width = ids.shape[1]
        ids = modes.generate(model, cache, ids, mask, 6)
        mask = modes.extend(mask, 6)
        answers.append(ids[:, width:])
    return torch.cat(answers, dim=1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "deepseek_v3"])
def test_ragged_turns_equal_dynamic(family: str, attention: str) -> None:
    model = models.shared(family, attention)
    policy = "keydiff" if family == "deepseek_v3" else "paged_eviction"
    cache = models.paged(model.config, budget=96, policy=policy)
    assert ragged_turns(model, cache).tolist() == ragged_turns(model, modes.dynamic(model)).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "llama4", "qwen3"])
def test_ragged_turns_are_exact(family: str) -> None:
    """Sliding layers mask by column, the paged ones by the slots their pads moved to."""
    model = models.shared(family)
    cache = models.paged(model.config, budget=20, block_size=4)
    with exact(model, cache, poison=True):
        ragged_turns(model, cache, count=2)


def test_plain_generate_after_assisted_stays_bounded() -> None:
    """generate never switches recording off again; what waits is committed by the next forward."""
    model = models.shared("llama")
    cache = models.paged(model.config, budget=24, block_size=4)
    ids, mask = modes.batch("prompt_lookup", padded=False)
    text = modes.generate(model, cache, ids, mask, 10, prompt_lookup_num_tokens=3)
    assert cache.layers[0].record_past
    longer = modes.generate(model, cache, text, torch.ones_like(text), 40)
    assert longer.shape[1] == text.shape[1] + 40
    assert cache.layers[0].held <= 24
    assert cache.layers[0].keys.shape[2] == 24
    assert cache.get_seq_length() == longer.shape[1] - 1


def test_one_row_then_many() -> None:
    """Prefill once, repeat the row, sample several continuations: as if each had been prefilled."""
    model = models.shared("llama")
    ids, mask = models.left_pad(models.prompts([40]))
    one = models.paged(model.config, budget=24, block_size=4)
    modes.forward(model, one, ids, mask, 0, 39)
    one.batch_repeat_interleave(3)
    many = models.paged(model.config, budget=24, block_size=4)
    ids, mask = ids.repeat(3, 1), mask.repeat(3, 1)
    modes.forward(model, many, ids, mask, 0, 39)
    tokens = [modes.generate(model, cache, ids, mask, 12, do_sample=True).tolist() for cache in (one, many)]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]

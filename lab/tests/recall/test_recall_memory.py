"""Recall with a budget in bytes: slots, summaries, blocks fetched ahead and one round fit into it."""

from typing import Any

import pytest
import torch

import models
import modes
from hf_paged_eviction import PagedEvictionCache

OURS = "paged_eviction"
#: A token of one row in one layer of the tiny llama: keys and values, 2 heads, 8 channels, float32.
TOKEN = 2 * 2 * 8 * 4
LAYERS, ROWS, BLOCK, LENGTH = 2, 2, 4, 100


def make(memory: int, text: str, **settings: Any) -> PagedEvictionCache:
    model = models.shared("llama", OURS)
    disposal = f"recall({text}, length={LENGTH})"
    return PagedEvictionCache(
        model.config, budget=f"{memory}B", block_size=BLOCK, policy="keydiff", disposal=disposal, **settings
    )


@pytest.mark.parametrize(
    ("text", "vectors", "blocks", "at_once"),
    [("blocks=2", 2, 0, 3), ("blocks=3, summary=vector, prefetch=2", 1, 2, 3), ("blocks=all", 2, 0, 3)],
)
def test_all_of_it_fits(text: str, vectors: int, blocks: int, at_once: int) -> None:
    """After every forward, up to the last token of the longest text; and one block more would not."""
    beside = LENGTH // BLOCK * vectors * TOKEN // 2 + blocks * BLOCK * TOKEN
    taken = ROWS * LAYERS * (beside + at_once * BLOCK * TOKEN)
    memory = taken + LAYERS * ROWS * TOKEN * 30
    cache = make(memory, text, heads="separate")
    model = models.shared("llama", OURS)
    ids, mask = (
        torch.stack(models.prompts([LENGTH + BLOCK + 1] * ROWS, seed=3)),
        torch.ones(ROWS, LENGTH + BLOCK + 1).long(),
    )
    for start, stop in [(0, 50), *((at, at + 1) for at in range(50, LENGTH))]:
        modes.forward(model, cache, ids, mask, start, stop)
        stats = cache.stats()
        assert stats.device_bytes + ROWS * at_once * BLOCK * TOKEN <= memory
    assert cache.budget == 28  # whole blocks of the 30 tokens that are left
    assert stats.summary_bytes == ROWS * LAYERS * beside or blocks  # what is fetched ahead may be less
    with pytest.raises(ValueError, match=r"recall\(length=100\)"):
        for at in range(LENGTH, LENGTH + BLOCK + 1):
            modes.forward(model, cache, ids, mask, at, at + 1)


def test_too_few_bytes() -> None:
    """The message says what they are in tokens, and how many are needed."""
    model = models.shared("llama", OURS)
    ids, mask = torch.stack(models.prompts([50], seed=3)), torch.ones(1, 50, dtype=torch.long)
    beside = LAYERS * (LENGTH // BLOCK * TOKEN + 3 * BLOCK * TOKEN)
    cache = make(beside + LAYERS * 16 * TOKEN, "blocks=2")
    with pytest.raises(ValueError, match=r"16.*recall\(blocks=2\).*16"):
        modes.forward(model, cache, ids, mask, 0, 50)
    cache = make(beside - 1, "blocks=2")
    with pytest.raises(ValueError, match=r"beside.*slots"):
        modes.forward(model, cache, ids, mask, 0, 50)

"""Single tokens that fill a row: each of its heads gets its share then, whatever the other rows do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.contract
BUDGET, SIZE = 32, 4
NEW = torch.randint(1, 60, (100,), generator=torch.Generator().manual_seed(5)).tolist()
OPTIONS: list[dict[str, Any]] = [
    {"policy": "keydiff"},
    {"policy": "snapkv", "bits": 4},
    {"policy": "streaming_llm", "bits": 2},
    {"policy": "h2o", "positions": "cache"},
    {"policy": "random", "recent_tokens": 8},
]


def table_of(config: Any) -> Heads:
    """Shares that differ by a factor of 10."""
    draw = torch.Generator().manual_seed(0)
    return Heads.of(10 ** torch.rand(config.num_hidden_layers, config.num_key_value_heads, generator=draw))


def cache_of(model: Any, **options: Any) -> PagedEvictionCache:
    return PagedEvictionCache(model.config, BUDGET, SIZE, allocator=table_of(model.config), **options)


class Reading:
    """Rows of so many tokens in one batch, padded on the left."""

    def __init__(self, model: Any, cache: PagedEvictionCache, lengths: list[int]) -> None:
        self.model, self.cache, self.logits = model, cache, list[Tensor]()
        self.lengths = torch.tensor(lengths)[:, None]
        self.mask = (torch.arange(max(lengths)) >= max(lengths) - self.lengths).long()

    @classmethod
    def of(cls, model: Any, cache: PagedEvictionCache, texts: list[Tensor]) -> Reading:
        """These texts are read at once."""
        self = cls(model, cache, [len(text) for text in texts])
        width = self.mask.shape[1]
        ids = torch.stack([torch.nn.functional.pad(text, (width - len(text), 0)) for text in texts])
        self.logits.append(self._feed(ids, (self.mask.cumsum(-1) - 1).clamp_min(0)))
        return self

    @torch.no_grad()
    def _feed(self, ids: Tensor, positions: Tensor) -> Tensor:
        settings = {"attention_mask": self.mask, "position_ids": positions, CACHE_ARGUMENT: self.cache}
        logits: Tensor = self.model(ids, **settings).logits[:, -1]
        return logits

    def go_on(self, tokens: list[int]) -> None:
        """The same single tokens come in all rows."""
        for token in tokens:
            self.mask = torch.cat([self.mask, torch.ones_like(self.lengths)], dim=1)
            self.logits.append(self._feed(torch.full_like(self.lengths, token), self.lengths))
            self.lengths = self.lengths + 1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_in_a_batch_as_alone(options: dict[str, Any]) -> None:
    """Some rows are filled by single tokens, each at another time; one overflowed before."""
    model = models.build("llama", "paged_eviction").double()
    texts = models.prompts([24, 20, 29, 60], seed=1)
    together = Reading.of(model, cache_of(model, **options), texts)
    together.go_on(NEW[:16])
    for row, text in enumerate(texts):
        alone = Reading.of(model, cache_of(model, **options), [text])
        alone.go_on(NEW[:16])
        for step, (ours, own) in enumerate(zip(together.logits, alone.logits, strict=True)):
            assert_close(ours[row], own[0], f"row {row}, token {step}")


def test_heads_get_their_shares_and_no_more_in_all() -> None:
    model = models.build("llama", "paged_eviction")
    reading = Reading.of(model, cache_of(model, policy="keydiff"), models.prompts([10], seed=1))
    reading.go_on(NEW[: BUDGET - 10])
    layers = [layer for _, layer in reading.cache.paged_layers]
    assert all(layer.table.limits is None and layer.held == BUDGET for layer in layers)  # all that fits is held
    reading.go_on(NEW[BUDGET - 10 :])
    limits = torch.cat([layer.table.limits[0] for layer in layers])
    prompt = Reading.of(model, cache_of(model, policy="keydiff"), models.prompts([4 * BUDGET], seed=1))
    assert torch.equal(limits, torch.cat([layer.table.limits[0] for _, layer in prompt.cache.paged_layers]))
    assert limits.sum() == BUDGET * len(limits) and limits.unique().numel() > 1
    held = torch.cat([(layer.positions[0] >= 0).sum(-1) for layer in layers])
    assert (held <= limits).all()


def test_a_saved_context_goes_on_likewise(tmp_path: Path) -> None:
    """Saved before rows are filled, and while larger heads still have room."""
    model = models.build("llama", "paged_eviction")
    for tokens in (15, 30):
        reading = Reading.of(model, cache_of(model, policy="keydiff"), models.prompts([10], seed=1))
        reading.go_on(NEW[:tokens])
        reading.cache.save(tmp_path / "context.safetensors", model=model)
        loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
        reading.go_on(NEW[tokens:])
        other = Reading(model, loaded, [10 + tokens])
        other.go_on(NEW[tokens:])
        for step, (ours, expected) in enumerate(zip(other.logits, reading.logits[1 + tokens :], strict=True)):
            assert_close(ours, expected, f"token {step}")

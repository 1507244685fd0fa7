"""Queries of a full block are observed in several layers at once: the statistics are those of each layer alone."""

from typing import Any

import pytest
import torch

import models
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.layer import observing

SHARES = [[1.6, 0.4], [0.7, 1.3], [1.1, 0.9]]
HEADS = {"allocator": Heads.of(SHARES), "heads": "separate"}


class Observed:
    """A model of three layers and its cache in 4 bits, and how many layers were observed at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, pads: int, **options: Any) -> None:
        self.model = models.build("llama", "paged_eviction", num_hidden_layers=3)
        settings = {"policy": "snapkv(window=8)", "block_size": 8, "bits": 4, "budget": 48, **options}
        self.cache = models.paged(self.model.config, **settings)
        self.draw, self.mask, self.sizes = torch.Generator().manual_seed(0), torch.ones(2, 60), list[int]()
        self.mask[0, :pads] = 0
        self._patch, self._most, self._together = monkeypatch, most, observing.observe_blocks
        self.read(60)

    def _note(self, observers: Any, *parts: Any) -> None:
        self.sizes.append(len(observers))
        self._together(observers, *parts)

    @torch.no_grad()
    def read(self, count: int) -> None:
        self.mask = torch.cat([self.mask, self.mask.new_ones(2, count if self.cache.get_seq_length() else 0)], dim=1)
        with self._patch.context() as patch:
            patch.setattr(observing, "MOST_BYTES", self._most)
            patch.setattr(observing, "observe_blocks", self._note)
            ids = torch.randint(0, 60, (2, count), generator=self.draw)
            self.model(ids, attention_mask=self.mask, **{CACHE_ARGUMENT: self.cache})

    def statistics(self) -> list[torch.Tensor]:
        return [part for layer in self.cache.layers for part in layer.observed.values()]


@pytest.mark.parametrize("options", [{}, HEADS, {**HEADS, "budget": 72}, {"policy": "h2o"}], ids=str)
@pytest.mark.parametrize("pads", [0, 11])
def test_together_as_alone(options: dict[str, Any], pads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = (Observed(monkeypatch, most, pads, **options) for most in (2**20, 0))
    for _ in range(40):
        together.read(1)
        alone.read(1)
        torch.testing.assert_close(together.statistics(), alone.statistics(), atol=1e-6, rtol=1e-4)
    assert set(alone.sizes) == {1} and len(alone.sizes) == sum(together.sizes) >= 12
    assert max(together.sizes) == 3

"""Rows out of step: scores are worked out for those alone that may choose a victim, and are what they are for all."""

from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.layer import group
from hf_paged_eviction.layer.layer_state import LayerState
from hf_paged_eviction.layer.scores import in_slots
from rows import compare
from witness import Witness

#: Shorter than the budget, so that each row is full at a moment of its own.
LENGTHS = [19, 14, 20, 11]
HEADS = {"allocator": Heads.of([[1.5, 0.5], [0.75, 1.25]]), "heads": "separate"}
WAYS: dict[str, dict[str, Any]] = {
    "16 bits": {"policy": "keydiff"},
    "separate heads": {"policy": "keydiff", "heads": "separate"},
    "4 bits": {"policy": "keydiff", "bits": 4},
    "unequal heads": {"policy": "keydiff", **HEADS},
    "unequal heads in 4 bits": {"policy": "keydiff", "bits": 4, **HEADS},
    "observed": {"policy": "h2o", "bits": 4},
    "observed by row": {"policy": "expected_attention"},
    "victims ahead": {"policy": "lazy_eviction(lag=8)"},
    "an action": {"policy": "keydiff", "disposal": Witness()},
    "positions in the cache": {"policy": "keydiff", "positions": "cache"},
}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were scored of a batch by each call, 0 for all; those of some are compared with those of all."""
    counts: list[int] = []

    def watched(state: LayerState, slots: Tensor | None, rows: Tensor | None = None) -> Tensor:
        scores = in_slots(state, slots, rows)
        if rows is not None:
            torch.testing.assert_close(scores, in_slots(state, slots)[rows], equal_nan=True)
        if state.known.rows > 1:
            counts.append(0 if rows is None else len(rows))
        return scores

    monkeypatch.setattr(group, "in_slots", watched)
    return counts


@pytest.mark.parametrize("way", WAYS)
def test_only_these_rows_are_scored(way: str, scored: list[int]) -> None:
    settings = {"budget": 24, "block_size": 4, **WAYS[way]}
    assert compare(models.shared("llama", "paged_eviction"), LENGTHS, **settings) > 0
    assert set(scored) <= {1, 2}  # the first and the last row are full at the same moments


def test_rows_of_beams_are_all_scored(scored: list[int]) -> None:
    """Which row is in which phase is not known once they were permuted."""
    model = models.shared("llama", "paged_eviction")
    ids, mask = models.left_pad(models.prompts(LENGTHS, seed=3))
    order, forced = torch.tensor([2, 0, 3, 1]), torch.stack(models.prompts([13] * 4, seed=5))
    logits = []
    for moved in (True, False):
        cache = PagedEvictionCache(model.config, 24, 4, policy="keydiff")
        rows = (ids, mask) if moved else (ids[order], mask[order])
        modes.forward(model, cache, *rows, 0, ids.shape[1])
        if moved:
            cache.batch_select_indices(order)
        scored.clear()
        longer = torch.cat([ids[order], forced], dim=1), modes.extend(mask[order], 13)
        steps = [modes.forward(model, cache, *longer, at, at + 1) for at in range(ids.shape[1], longer[0].shape[1])]
        logits.append(torch.cat(steps, dim=1))
        assert scored and (0 in scored) == moved == (1 not in scored)
    torch.testing.assert_close(*logits)

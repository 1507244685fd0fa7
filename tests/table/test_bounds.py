"""Protected spans as tensors against the same spans on the host."""

from __future__ import annotations

import random

import torch

from hf_paged_eviction.table.bounds import blocks_in, bounds_of, inside, smallest_budget, spans_in
from hf_paged_eviction.table.budget import BlockBudget
from hf_paged_eviction.table.spans import Spans, blocks_of, merged


def drawn(rng: random.Random) -> Spans:
    starts = [rng.randint(0, 40) for _ in range(rng.randint(0, 4))]
    return merged((start, start + rng.randint(0, 12)) for start in starts)


def test_spans_as_tensors_say_what_they_say_on_the_host() -> None:
    rng, device = random.Random(0), torch.device("cpu")
    for _ in range(200):
        first, size, recent = rng.choice([0, 0, 3, 8]), rng.randint(1, 9), rng.choice([0, 1, 20])
        rows = [drawn(rng) for _ in range(rng.choice([0, 1, 3]))]
        budget = BlockBudget(100 * size, size, first, recent, spans=tuple(rows))
        bounds = bounds_of(rows, first, 3, device)
        expected = [merged([(0, first), *row]) for row in (rows or [()]) for _ in range(3 // max(len(rows), 1))]
        assert spans_in(bounds) == expected
        assert blocks_in(bounds, size).tolist() == [blocks_of(spans, size) for spans in expected]
        everywhere = torch.arange(-1, 60).expand(3, -1)
        protected = [[any(start <= at < end for start, end in spans) for at in range(-1, 60)] for spans in expected]
        assert inside(bounds, everywhere).tolist() == protected
        whole = [(blocks_of(spans, size) + budget.recent_blocks + 1) * size for spans in expected]
        assert smallest_budget(bounds, budget).tolist() == whole

"""A batch against its rows alone, forward by forward."""

from typing import Any

import torch
from torch import Tensor

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache

#: Three blocks of four, and a token.
STEPS = 13


def steps(model: Any, cache: Any, rows: list[Tensor], forced: Tensor, turn: list[Tensor] | None = None) -> list[Any]:
    """Prompt, forced single tokens and perhaps a second ragged turn; what was said and held after each forward."""
    ids, mask = models.left_pad(rows)
    record = []

    def feed(start: int) -> None:
        logits = modes.forward(model, cache, ids, mask, start, ids.shape[1])
        held = [
            [[sorted(p for p in head if p >= 0) for head in heads] for heads in layer.positions.tolist()]
            for _, layer in cache.paged_layers
        ]
        record.append((logits[:, -1], held))

    feed(0)
    for step in range(forced.shape[1]):
        ids, mask = torch.cat([ids, forced[:, step : step + 1]], dim=1), modes.extend(mask, 1)
        feed(ids.shape[1] - 1)
        if turn is not None and step == forced.shape[1] // 2:
            more, real = models.left_pad(turn)
            start = ids.shape[1]
            ids, mask = torch.cat([ids, more], dim=1), torch.cat([mask, real], dim=1)
            feed(start)
    return record


def compare(model: Any, lengths: list[int], turns: list[int] | None = None, **settings: Any) -> int:
    """Batch against rows alone; returns the real tokens that were evicted."""
    rows = models.prompts(lengths, seed=3)
    turn = models.prompts(turns, seed=4) if turns else None
    forced = torch.stack(models.prompts([STEPS] * len(rows), seed=5))
    cache = PagedEvictionCache(model.config, **settings)
    together = steps(model, cache, rows, forced, turn)
    for row in range(len(rows)):
        own = PagedEvictionCache(model.config, **settings)
        alone = steps(model, own, [rows[row]], forced[row : row + 1], turn and [turn[row]])
        for at, ((logits, held), (own_logits, own_held)) in enumerate(zip(together, alone, strict=True)):
            for layer, own_layer in zip(held, own_held, strict=True):
                assert layer[row] == own_layer[0], f"row {row}, forward {at}: other tokens held"
            assert_close(logits[row], own_logits[0], f"row {row}, forward {at}")
    return cache.stats().evicted_tokens

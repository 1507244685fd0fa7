"""Of the tokens that the full cache's answer attends to most, how many are held when the answer begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import isnan

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction.internals import PagedLayer

from .oracle import Oracle

#: Of one row: by layer, as text, the share for each KV head.
Hits = dict[str, list[float]]


def hit_rates(ahead: Oracle, lengths: Tensor, cache: DynamicCache, most: int) -> Sequence[Hits | None]:
    """What a cache that has read some prompts still holds of what will count.

    For each layer and KV head the tokens of the prompt are put in order by the attention that all tokens of the full
    cache's answer pay to them together, the mean over the query heads of the KV head; the last token of the answer is
    never fed, so it pays none. Of the first `most` (of all, if the prompt is shorter) the rate is the share that the
    cache holds.

    Args:
        ahead: has looked ahead for these rows.
        lengths: `[rows]` int64, tokens of the prompts, as many as the cache has seen.
        cache: layers that never evict have no rate.
        most: how many count.

    Returns:
        Of each row; None where the full cache's answer is one token long and attends to nothing.
    """
    columns = int(lengths.max())
    rates = {
        str(index): _layer_rates(paid_from(ahead, index, lengths), held_positions(layer, columns), most).tolist()
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, PagedLayer) and index in ahead.future
    }
    return [_of_row(rates, row) for row in range(len(lengths))]


def paid_from(ahead: Oracle, index: int, lengths: Tensor) -> Tensor:
    """`[rows, kv_heads, longest]`, what the tokens behind each prompt pay to its own; -1 behind its end."""
    future, columns = ahead.future[index], int(lengths.max())
    lengths = lengths.to(future.device)
    moment = lengths - ahead.first.to(future.device)
    paid = future[torch.arange(len(future), device=future.device), :, moment.clamp_max(future.shape[2] - 1), :columns]
    paid = paid.masked_fill((moment >= future.shape[2])[:, None, None], 0.0)
    return paid.masked_fill(torch.arange(columns, device=future.device) >= lengths[:, None, None], -1.0)


def held_positions(layer: PagedLayer, columns: int) -> Tensor:
    """`[rows, 1 or kv_heads, columns]` bool, which positions a layer holds."""
    positions = layer.positions
    places = torch.where((positions >= 0) & (positions < columns), positions, columns)
    held = torch.zeros(*positions.shape[:2], columns + 1, dtype=torch.bool, device=positions.device)
    return held.scatter_(-1, places, True)[..., :columns]


def _layer_rates(paid: Tensor, held: Tensor, most: int) -> Tensor:
    """`[rows, kv_heads]`, nan where nothing was paid."""
    best = paid.topk(min(most, paid.shape[-1]), dim=-1)
    counted = best.values >= 0
    held_of_best = held.to(paid.device).expand_as(paid).gather(-1, best.indices) & counted
    return torch.where(paid.amax(-1) > 0, held_of_best.sum(-1) / counted.sum(-1), torch.nan)


def _of_row(rates: Mapping[str, list[list[float]]], row: int) -> Hits | None:
    layer_rates = {index: [round(rate, 4) for rate in rows[row]] for index, rows in rates.items()}
    return None if any(map(isnan, chain.from_iterable(layer_rates.values()))) else layer_rates or None

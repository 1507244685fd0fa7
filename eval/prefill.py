"""The part of the prompt that is read before anything is asked, computed once for every policy and budget."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def pad_left(rows: Sequence[Sequence[int]], pad_id: int, device: str) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both `[rows, longest]`, padded on the left."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad_id)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = torch.tensor(row)
        mask[index, longest - len(row) :] = 1
    return ids.to(device), mask.to(device)


@torch.inference_mode()
def read(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache) -> None:
    """Feed left-padded tokens `[rows, n]` to the model, into the cache."""
    accepted = inspect.signature(model.forward).parameters
    # Left padding shifts a row's tokens: their positions count from the first real one.
    optional = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0), "logits_to_keep": 1}
    model(
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        **{name: value for name, value in optional.items() if name in accepted},
    )


def can_share(cache: DynamicCache) -> bool:
    """Whether the cache's keys and values are all that its layers remember of a prompt."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def replay(source: DynamicCache, target: DynamicCache) -> None:
    """Give `target` the keys and values of `source`, layer by layer, exactly as a prefill would."""
    for index, layer in enumerate(source.layers):
        target.update(layer.keys, layer.values, index)

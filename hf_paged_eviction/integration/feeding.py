"""Feed tokens to a model and a cache."""

import inspect
from typing import Any

import torch
from torch import Tensor

from ..masks.padding import Padding
from .cache_argument import cache_kwargs
from .kept_state import forget_last_text


def feed(
    model: Any, ids: Tensor, mask: Tensor | None, cache: Any, *, positions: Tensor | None = None, keep: int = 1
) -> Tensor:
    """Feed tokens of a text without images to the model, into the cache. What the model has read before with another
    cache does not matter.

    Args:
        ids: `[rows, n]`.
        mask: `[rows, seen + n]`, nonzero = real token, for all that the cache has seen and the new tokens; None = all.
        positions: `[rows, n]` int64; None = the index of each token among the real tokens of its row.
        keep: number of last tokens whose logits are computed; 0 = all. A model without this option computes all of
            them.

    Returns:
        `[rows, keep or more, vocabulary]`.
    """
    if positions is None and mask is not None:
        # Pads do not count.
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    accepted = inspect.signature(model.forward).parameters
    optional = {"position_ids": positions, "logits_to_keep": keep}
    kwargs = {name: value for name, value in optional.items() if name in accepted and value is not None}
    kwargs |= cache_kwargs(model, cache)
    forget_last_text(model)
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=True, **kwargs).logits
    return logits


def follow_up(
    input_ids: Tensor, attention_mask: Tensor | None, seen: int, rows: int | None, padding: Padding
) -> dict[str, Tensor]:
    """See `PagedEvictionCache.follow_up`, which has handled the columns of the past.

    Args:
        attention_mask: `[rows, new]`.
        seen: number of tokens that the cache has seen per row.
        rows: number of rows of the cache; None before the first forward.
        padding: which of those tokens were pads.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids)
    if input_ids.ndim != 2 or not input_ids.shape[1] or mask.shape != input_ids.shape:
        raise ValueError(
            f"input_ids must be [rows, new] with at least one token, and attention_mask the same; got "
            f"{list(input_ids.shape)} and {list(mask.shape)}."
        )
    if rows is not None and len(input_ids) != rows:
        raise ValueError(
            f"input_ids has {len(input_ids)} rows and the cache {rows}: cache.batch_repeat_interleave(n) makes n of "
            "each."
        )
    real = padding.columns(0, seen, len(input_ids), input_ids.device)
    before = mask.new_ones(len(mask), seen) if real is None else real.to(mask.dtype)
    return {
        "input_ids": torch.cat([input_ids[:, :1].expand(-1, seen), input_ids], dim=1),
        "attention_mask": torch.cat([before, mask], dim=1),
    }

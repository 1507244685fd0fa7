"""The inputs of a later turn."""

import warnings
from typing import Any

import torch
from torch import Tensor

from ..masks.padding import Padding


def check_new(input_ids: Any, attention_mask: Any, seen: int) -> None:
    """Refuse what holds no tokens or more than tokens, and warn of what looks like the whole text.

    Raises:
        TypeError: no tensors.
    """
    for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if not isinstance(given, Tensor) and (given is not None or name == "input_ids"):
            raise TypeError(
                f"{name} must be a tensor [rows, new], got {type(given).__name__}: give encoding.input_ids of what a "
                "tokenizer returns with return_tensors='pt', and output.sequences[:, seen:] of what generate returns."
            )
    if input_ids.ndim == 2 and input_ids.shape[1] == seen + 1:
        warnings.warn(
            f"follow_up was given {seen + 1} tokens, and this cache has seen {seen}: that is how long the output of "
            "generate is. follow_up takes the new tokens alone, and reads all that it is given. For the whole text "
            "call generate(text, cache=cache).",
            stacklevel=3,
        )


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
    shown = padding.shown(0, seen, len(input_ids), input_ids.device)
    before = mask.new_ones(len(mask), seen) if shown is None else shown.to(mask.dtype)
    return {
        "input_ids": torch.cat([input_ids[:, :1].expand(-1, seen), input_ids], dim=1),
        "attention_mask": torch.cat([before, mask], dim=1),
    }

"""One forward of a model that fills a cache, as its `forward` wants to be called."""

import inspect
from typing import Any

from torch import Tensor


def feed(
    model: Any, ids: Tensor, mask: Tensor | None, cache: Any, *, positions: Tensor | None = None, keep: int = 1
) -> Tensor:
    """Feed tokens to the model, into the cache.

    Args:
        ids: `[rows, n]`.
        mask: `[rows, seen + n]`, nonzero = real token, for all that the cache has seen and the new tokens; None = all.
        positions: `[rows, n]` int64; if None, the place of each token among the real ones of its row.
        keep: last tokens whose logits are wanted; 0 = all. A model that knows no such choice gives all of them.

    Returns:
        `[rows, keep or more, vocabulary]`.
    """
    if positions is None and mask is not None:
        # Pads do not count.
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    accepted = inspect.signature(model.forward).parameters
    optional = {"position_ids": positions, "logits_to_keep": keep}
    known = {name: value for name, value in optional.items() if name in accepted and value is not None}
    logits: Tensor = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **known).logits
    return logits

"""Feed tokens to a model and a cache."""

import inspect
from typing import Any

from torch import Tensor

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

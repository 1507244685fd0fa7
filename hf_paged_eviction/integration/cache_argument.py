"""The name of the argument that takes a cache: `past_key_values` before transformers 5.24, `cache` since."""

import inspect
from collections.abc import Callable
from typing import Any

from transformers.masking_utils import create_causal_mask

#: The argument of `generate`, and of the models of the transformers release that is installed. Outputs of models have
#: an attribute of the same name.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

#: All names, the newest first.
CACHE_NAMES = ("cache", "past_key_values")


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name of the argument of `forward` that takes a cache; None if there is none.

    A model whose code was written for another release may have the other name.
    """
    takes = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in takes), None)


def unwrapped(model: Any) -> Any:
    """The model inside PEFT's wrapper, whose own `forward` does not name its arguments."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def cache_kwargs(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword arguments that pass `cache` to a call of `model`.

    For `generate` it is always `{CACHE_ARGUMENT: cache}`.
    """
    return {cache_argument(unwrapped(model).forward) or CACHE_ARGUMENT: cache}

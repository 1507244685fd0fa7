"""Refuse options that a static cache does not support."""

from collections.abc import Sequence
from typing import Any

from ..integration.models import is_latent_attention, is_paged
from ..policies import EvictionPolicy
from ..queries.attention import PAGED_EVICTION

#: Attention implementations that hide slots which are not in use yet.
_MASKING = ("sdpa", "eager", PAGED_EVICTION)


def refusal(what: str) -> ValueError:
    """Make the error for an operation that a static cache does not support."""
    return ValueError(f"A static cache cannot {what}: its tensors stay where they are. Use static=False.")


def check_static(config: Any, plan: Sequence[Any], attention: str | None, policy: EvictionPolicy) -> None:
    """Refuse models and policies that a static cache does not support.

    Args:
        plan: the layers of the model's cache, see `layer_plan`.

    Raises:
        ValueError: not supported; the message gives the reason and what to use instead.
    """
    if policy.needs.queries and is_latent_attention(config):
        raise ValueError(
            f"static=True: {policy.label!r} compares queries with keys, and this model caches latents (MLA). Use "
            "static=False or a policy that reads keys and values."
        )
    check_static_attention(attention)
    if not any(map(is_paged, plan)):
        raise ValueError("static=True: no layer of this model can evict. Use transformers' StaticCache.")
    for index, layer in enumerate(plan):
        if is_paged(layer):
            continue
        if getattr(layer, "is_sliding", False):
            raise ValueError(
                f"static=True: layer {index} of this model has a sliding window. transformers counts its tokens in "
                "Python, so that the step is compiled again as the count grows. Use static=False."
            )
        if not layer.is_compileable:
            raise ValueError(
                f"static=True: layer {index} of this model needs a {type(layer).__name__}, which cannot be compiled. "
                "Use static=False."
            )


def check_static_attention(name: str | None) -> None:
    """Refuse an attention implementation that would see unused slots.

    Raises:
        ValueError: it would; the message names implementations that work.
    """
    if name is not None and name not in _MASKING:
        raise ValueError(
            f"static=True does not work with the attention implementation {name!r}, which would see unused slots. Call "
            f"model.set_attn_implementation({PAGED_EVICTION!r}) (or 'sdpa', 'eager'), or use static=False."
        )

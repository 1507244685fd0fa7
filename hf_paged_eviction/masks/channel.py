"""How a cache learns the 2-D attention mask without help from the user.

Every model that builds its mask with `transformers.masking_utils` calls `get_mask_sizes` of the cache, and passes the
result, together with the 2-D mask, to one of the functions in a public table (`AttentionMaskInterface`).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from ..tensors.graphs import outside_graphs

#: Takes the 2-D mask of the coming forward (or None), the number of rows, and the configuration of the model (or None);
#: returns the mask to build from, and whether the attention that follows needs none.
Tell = Callable[[Tensor | None, int, Any], tuple[Tensor | None, bool]]


def is_plain_causal(settings: dict[str, Any]) -> bool:
    """Whether a mask function is called for a plain causal mask: no window, no bidirectional blocks."""
    return settings.get("mask_function", causal_mask_function) is causal_mask_function


class MaskOffset(int):
    """A cache never sees the padding mask. So `get_mask_sizes` returns this int, which holds a callback, and our
    wrapper of transformers' mask functions calls it with the mask.

    For other caches the wrapper passes all arguments on unchanged.

    Attributes:
        tell: the callback.
        placeholder: build a mask that will not be used, because attention must see that there is one.
        static: transformers builds a mask for each single token, because the cache can be compiled.
    """

    tell: Tell
    placeholder: bool
    static: bool


def wrap_mask_functions() -> None:
    """Wrap the mask functions that are registered now. A second call wraps only new ones."""
    for name, build_mask in list(AttentionMaskInterface().items()):
        if not getattr(build_mask, "knows_mask_offset", False):
            AttentionMaskInterface.register(name, _wrapped(build_mask))


def _wrapped(build_mask: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(build_mask)
    def with_cache(*args: Any, **kwargs: Any) -> Any:
        offset = kwargs.get("kv_offset")
        if not isinstance(offset, MaskOffset):
            return build_mask(*args, **kwargs)
        if torch.compiler.is_compiling():
            return outside(*args, **kwargs)  # a graph cannot call the cache
        mask, rows, config = kwargs.get("attention_mask"), kwargs["batch_size"], kwargs.get("config")
        kwargs["attention_mask"], needs_none = offset.tell(mask, rows, config)
        kwargs["kv_offset"] = int(offset)
        may_be_none = kwargs.get("allow_is_causal_skip", True)  # some models use the mask themselves
        kwargs["allow_is_causal_skip"] = may_be_none and not offset.placeholder
        if needs_none and (may_be_none or offset.static) and is_plain_causal(kwargs):
            return None
        if offset.placeholder and not is_plain_causal(kwargs):
            # Not usable, and its function may index columns that do not exist: attention refuses it.
            return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device="cpu")
        return build_mask(*args, **kwargs)

    outside = outside_graphs(with_cache)
    with_cache.knows_mask_offset = True  # type: ignore[attr-defined]
    return with_cache

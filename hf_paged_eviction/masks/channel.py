"""How a cache learns the 2-D attention mask without any action of the user.

Every model that builds its mask with `transformers.masking_utils` asks the cache for `get_mask_sizes` and hands the
answer, together with the 2-D mask, to one of the functions in a public table (`AttentionMaskInterface`). Our answer
is an `int` that remembers whom to tell; the functions in the table are wrapped once, when the first cache is made, to
look for it. For any other cache the wrapper hands its arguments through untouched.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from ..graphs import outside_graphs

#: Takes the 2-D mask of the coming forward (or None) and the number of rows; returns the mask to build from, and
#: whether the attention that follows needs none.
Tell = Callable[[Tensor | None, int], tuple[Tensor | None, bool]]


class TellingOffset(int):
    """A `kv_offset` that remembers who wants to see the mask it is used for."""

    tell: Tell
    placeholder: bool
    static: bool

    @classmethod
    def of(cls, offset: int, tell: Tell, placeholder: bool = False, static: bool = False) -> "TellingOffset":
        """The number `offset`, with somebody to tell.

        Args:
            placeholder: the mask will not be used, and there must be one so that attention can tell.
            static: transformers asks for a mask of each single token, because the cache can be compiled.
        """
        self = cls(offset)
        self.tell = tell
        self.placeholder = placeholder
        self.static = static
        return self


def is_plain_causal(settings: dict[str, Any]) -> bool:
    """Whether a mask function is asked for a causal mask and no more: no window, no block that sees all of itself."""
    return settings.get("mask_function", causal_mask_function) is causal_mask_function


def _telling(build_mask: Callable[..., Any]) -> Callable[..., Any]:
    def tell(offset: TellingOffset, *args: Any, **kwargs: Any) -> Any:
        kwargs["attention_mask"], needs_none = offset.tell(kwargs.get("attention_mask"), kwargs["batch_size"])
        kwargs["kv_offset"] = int(offset)
        may_be_none = kwargs.get("allow_is_causal_skip", True)  # some models compute with the mask themselves
        kwargs["allow_is_causal_skip"] = may_be_none and not offset.placeholder
        if is_plain_causal(kwargs):
            if needs_none and (may_be_none or offset.static):
                return None
        elif offset.placeholder:
            # Nobody can use it, and its function may look at columns that are not there: attention refuses it.
            return torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        return build_mask(*args, **kwargs)

    telling = outside_graphs(tell)  # a graph could not tell anybody

    @wraps(build_mask)
    def with_cache(*args: Any, **kwargs: Any) -> Any:
        offset = kwargs.get("kv_offset")
        return telling(offset, *args, **kwargs) if isinstance(offset, TellingOffset) else build_mask(*args, **kwargs)

    with_cache.tells_paged_eviction = True  # type: ignore[attr-defined]
    return with_cache


def open_channel() -> None:
    """Wrap the mask functions that are registered now. Doing it again wraps only what came since."""
    for name, build_mask in list(AttentionMaskInterface().items()):
        if not getattr(build_mask, "tells_paged_eviction", False):
            AttentionMaskInterface.register(name, _telling(build_mask))

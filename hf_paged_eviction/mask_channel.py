"""How a cache learns the 2-D attention mask without any action of the user.

Every model that builds its mask with `transformers.masking_utils` asks the cache for `get_mask_sizes` and hands the
answer, together with the 2-D mask, to one of the functions in a public table (`AttentionMaskInterface`). Our answer
is an `int` that remembers its cache; the functions in the table are wrapped once, when the first cache is made, to
look for it. For any other cache the wrapper hands its arguments through untouched.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

if TYPE_CHECKING:
    from .cache import PagedEvictionCache


class CacheOffset(int):
    """A `kv_offset` that remembers whose it is and for how many new tokens it was asked."""

    cache: "PagedEvictionCache"
    query_length: int

    @classmethod
    def of(cls, offset: int, cache: "PagedEvictionCache", query_length: int) -> "CacheOffset":
        self = cls(offset)
        self.cache = cache
        self.query_length = query_length
        return self


def _listening(build_mask: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(build_mask)
    def with_cache(*args: Any, **kwargs: Any) -> Any:
        offset = kwargs.get("kv_offset")
        if isinstance(offset, CacheOffset):
            mask: Tensor | None = kwargs.get("attention_mask")
            batch: int = kwargs["batch_size"]
            kwargs["attention_mask"] = offset.cache._see_mask(mask, offset.query_length, batch)
            kwargs["kv_offset"] = int(offset)
        return build_mask(*args, **kwargs)

    with_cache.tells_paged_eviction = True  # type: ignore[attr-defined]
    return with_cache


def open_channel() -> None:
    """Wrap the mask functions that are registered now. Doing it again wraps only what came since."""
    for name, build_mask in list(AttentionMaskInterface._global_mapping.items()):
        if not getattr(build_mask, "tells_paged_eviction", False):
            AttentionMaskInterface.register(name, _listening(build_mask))

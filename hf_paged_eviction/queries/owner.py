"""The interface between attention and the layer whose keys it uses."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ..attention.parts import Part, Read
from .observer import Queries


class KeyOwner(Protocol):
    """Gives masks to the attention implementation "paged_eviction", and gets its queries.

    The layer of a cache is one, or a recorder beside a layer; it calls `hand_over`.

    Attributes:
        layer_idx: index in the model.
        masks_itself: the model's own mask does not fit these keys, so `mask` is used.
        held: number of tokens held before this forward, or after it.
        all_real: whether a single query sees all keys, so that it needs no mask.
        all_new: whether all keys belong to this forward and none to a pad, so that a causal mask is right.
        reads: whether `extra_attention` and `logit_bias` must be called.
        waits: whether it must get the queries before it can continue.
        kv_unchanged: whether the last attention call got the keys and values of `hand_over` unchanged; attention sets
            it.
    """

    layer_idx: int
    kv_unchanged: bool
    reads: bool
    masks_itself: bool

    @property
    def waits(self) -> bool: ...

    @property
    def held(self) -> int: ...

    @property
    def all_real(self) -> bool: ...

    @property
    def all_new(self) -> bool: ...

    def mask(self, query_length: int) -> Tensor | None:
        """`[batch, 1 or kv_heads, query_length, tokens]` bool; None = every query sees all keys."""

    def extra_attention(self, queries: Queries, values: Tensor) -> Iterable[Part | Read] | None:
        """Called before the queries are compared with the keys of `hand_over`.

        The memory of these keys, and of `values`, may still be changed. Returns additional keys and values, which are
        consumed one after the other; None = none.
        """

    def logit_bias(self, tokens: int) -> Tensor | None:
        """`[batch, kv_heads, 1, tokens]` float32, added to the logits of the keys of `hand_over`; None = nothing."""

    def attended(self, queries: Queries) -> None:
        """Called after the queries were compared with the keys of `hand_over`."""

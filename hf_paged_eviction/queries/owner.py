"""Whose keys attention compares queries with."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ..attention.parts import Part, Read
from .observer import Queries


class KeyOwner(Protocol):
    """Whom the attention implementation "paged_eviction" asks for a mask and tells of the queries.

    Whoever hands keys over (`hand_over`) is one: the layer of a cache, or what stands beside it and records.

    Attributes:
        layer_idx: index in the model.
        masks_itself: the model's own mask does not fit these keys; `mask` is used.
        held: tokens held before this forward, or after it.
        all_real: whether a single query may see all keys, so that it needs no mask.
        all_new: whether all keys are those of this forward and none of a pad, so that causality says what is seen.
        reads: whether `extra_attention` and `logit_bias` want to be called.
        waits: whether it cannot go on before it is told of the queries that are compared with its keys.
        kv_unchanged: whether the last attention got the very keys and values that were handed over; set by it.
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
        """`[batch, 1 or kv_heads, query_length, tokens]` bool; None where every query sees all."""

    def extra_attention(self, queries: Queries, values: Tensor) -> Iterable[Part | Read] | None:
        """These queries are about to be compared with the keys that were handed over.

        What lies behind those keys, and the `values` beside them, may still be changed. Returns what is to be attended
        to besides, taken one after the other; None = nothing.
        """

    def logit_bias(self, tokens: int) -> Tensor | None:
        """`[batch, kv_heads, 1, tokens]` float32, added to the logits of the keys that were handed over; None =
        nothing."""

    def attended(self, queries: Queries) -> None:
        """These queries were compared with the keys that were handed over."""

"""The interface between attention and the layer whose keys it uses."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ..attention.parts import Part, Read
from ..masks.of_attention import MaskOwner
from .observer import Queries


class KeyOwner(MaskOwner, Protocol):
    """Gives masks to the attention implementation "paged_eviction", and gets its queries.

    The layer of a cache is one, or a recorder beside a layer; it calls `hand_over`.

    Attributes:
        layer_idx: index in the model.
        reads: whether `extra_attention` and `logit_bias` must be called.
        kv_unchanged: whether the last attention call got the keys and values of `hand_over` unchanged; attention sets
            it.
    """

    layer_idx: int
    kv_unchanged: bool
    reads: bool

    @property
    def waits(self) -> bool:
        """Whether it must get the queries before it can continue."""
        return True

    def extra_attention(self, queries: Queries, values: Tensor) -> Iterable[Part | Read] | None:
        """Called before the queries are compared with the keys of `hand_over`.

        The memory of these keys, and of `values`, may still be changed. Returns additional keys and values, which are
        consumed one after the other; None = none.
        """
        return None

    def logit_bias(self, tokens: int) -> Tensor | None:
        """`[batch, kv_heads, 1, tokens]` float32, added to the logits of the keys of `hand_over`; None = nothing."""
        return None

    def attended(self, queries: Queries) -> None:
        """Called after the queries were compared with the keys of `hand_over`."""

"""Listening to the layers of a cache that evicts nothing."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from .attention import hand_over
from .observer import Queries


class QueryHook:
    """A `KeyOwner` beside a layer of any cache: the model's own mask counts.

    Args:
        layer_idx: index in the model.
    """

    masks_itself = reads = False
    kv_unchanged = False
    waits = True
    held = 0
    all_real = all_new = False

    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx

    def mask(self, query_length: int) -> Tensor | None:
        """None: it has no mask of its own."""
        return None

    def extra_attention(self, queries: Queries, values: Tensor) -> None:
        """Nothing."""

    def logit_bias(self, tokens: int) -> None:
        """Nothing."""

    def attended(self, queries: Queries) -> None:
        """The queries of one forward; for subclasses to note."""


class HookedCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` whose layers are listened to. The model must use the attention "paged_eviction".

    Attributes:
        hooks: by index of their layers; those that are taken out hear no more.

    Args:
        config: of the model.
        hooks: see there.
    """

    def __init__(self, config: Any, hooks: Mapping[int, QueryHook]) -> None:
        super().__init__(config=config)
        self.hooks = dict(hooks)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys and values."""
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx in self.hooks:
            hand_over(self.hooks[layer_idx], *updated, key_states.shape[2])
        return updated

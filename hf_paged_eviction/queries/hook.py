"""Record the queries of a cache that evicts nothing."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from .handover import KeyOwner, hand_over


class QueryHook(KeyOwner):
    """A layer of any cache. The model's own mask is used. Subclasses override `attended`.

    Args:
        layer_idx: index in the model.
    """

    masks_itself = reads = kv_unchanged = False

    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx


class HookedCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` with a hook per layer. The model must use the attention implementation "paged_eviction".

    Attributes:
        hooks: by index of the layer. A hook that is removed from the dictionary gets no more queries.

    Args:
        config: `model.config`.
        hooks: see above.
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

"""The attention implementation "paged_eviction": sdpa that tells the cache of the queries.

A cache sees keys and values only. `PagedEvictionCache.update` leaves its layer here, per thread; the attention call
that follows picks it up. Registering a name changes nothing for models that do not ask for it.
"""

import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .attention_rows import Logits
from .layer import PagedLayer
from .observed_layer import ObservedLayer
from .observer import Queries

#: For `model.set_attn_implementation` and `from_pretrained(attn_implementation=...)`.
PAGED_EVICTION = "paged_eviction"


@dataclass
class _Handover(threading.local):
    layer: PagedLayer | None = None
    shape: tuple[int, int] = (0, 0)


_handover = _Handover()


class ModelAttention:
    """Which attention implementation a model uses now; it may be changed after the cache was made.

    Attributes:
        shows_queries: whether it is ours, as of the last `look`.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.look()

    def look(self) -> None:
        """Take note of a change. Once per forward: reading a configuration costs more than writing a token."""
        self.shows_queries: bool = self.name == PAGED_EVICTION

    @property
    def name(self) -> str | None:
        """Such as "sdpa"."""
        name: str | None = self._config._attn_implementation
        return name

    @property
    def has_masks(self) -> bool:
        """Whether transformers builds masks for this implementation."""
        return self.name in AttentionMaskInterface._global_mapping

    def __deepcopy__(self, memo: Any) -> "ModelAttention":
        return self  # a copied cache serves the same model


def hand_over(layer: PagedLayer, keys: Tensor) -> None:
    """The attention call that follows belongs to this layer, which returned `keys` `[batch, heads, tokens, dim]`."""
    _handover.layer, _handover.shape = layer, (keys.shape[0], keys.shape[2])


def _receive(module: torch.nn.Module, key: Tensor) -> PagedLayer | None:
    layer, _handover.layer = _handover.layer, None
    # Left over from a forward that failed, or a call that has nothing to do with the cache (cross-attention).
    if layer is None or _handover.shape != (key.shape[0], key.shape[2]):
        return None
    return layer if getattr(module, "layer_idx", layer.layer_idx) == layer.layer_idx else None


def paged_eviction_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, as transformers calls it, or whoever wraps its functions and gives `dropout` in order.

    Args:
        query: `[batch, query_heads, q, dim]`.
        key, value: `[batch, kv_heads, tokens, dim]`.
        attention_mask: bool or additive, broadcastable to `[batch, query_heads, q, tokens]`; None = causal.
        softcap, s_aux: soft-capping and attention sinks; such models compute with their own eager function.
    """
    layer = _receive(module, key)
    if layer is not None:
        attention_mask = _fitting(attention_mask, layer, query)
        if isinstance(layer, ObservedLayer) and layer.masks_itself:
            kwargs["is_causal"] = False  # some models work it out from the mask that was not used
    output: tuple[Tensor, Tensor | None]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    kwargs["dropout"] = dropout
    if softcap is None and s_aux is None:
        output = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    else:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        mask = _additive(attention_mask, query, key)
        output = eager(module, query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **kwargs)
    if isinstance(layer, ObservedLayer):
        layer.attended(Queries(query, key, Logits(scaling, softcap, s_aux)))
    return output


def _fitting(mask: Tensor | None, layer: PagedLayer, query: Tensor) -> Tensor | None:
    """The mask of this layer, where the model's does not fit it, or none where none is needed."""
    count = query.shape[2]
    if isinstance(layer, ObservedLayer) and layer.masks_itself:
        if not _is_ours(mask):
            raise ValueError(
                "This model or call brings an attention mask of its own making, but the layers of this cache hold "
                "different numbers of tokens, so no mask fits them all. Use allocator='uniform', or pass the 2-D "
                "attention_mask."
            )
        own = layer.mask(count)
        return own if own is None or own.shape[1] == 1 else own.repeat_interleave(query.shape[1] // own.shape[1], 1)
    # In this order: compiled code would be bound to where the mask came from even where that does not matter.
    return None if count == 1 and layer.all_real and _is_ours(mask) else mask


def _is_ours(mask: Tensor | None) -> bool:
    return mask is None or getattr(mask, "of_paged_eviction", False)


def _build_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """What sdpa gets, marked: a mask without the mark was made by somebody else and is left as it is."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    if mask is not None:
        mask.of_paged_eviction = True  # type: ignore[attr-defined]
    return mask


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as eager attention wants it: added to the logits."""
    if mask is None:
        if query.shape[2] == 1:
            return None
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)


AttentionInterface.register(PAGED_EVICTION, paged_eviction_attention)
AttentionMaskInterface.register(PAGED_EVICTION, _build_mask)

"""The attention implementation "paged_eviction": sdpa that shows the queries to the cache.

Registering the name changes nothing for models that do not use it.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from ..attention.in_order import noted
from ..attention.in_place import carried
from ..attention.parts import Part, Read, join, read
from ..attention.weights import Logits
from ..masks.of_attention import (
    additive,
    as_bias,
    biased,
    check_own_mask,
    is_causal,
    marked_mask,
    mask_of_call,
    per_query_head,
)
from ..tensors.autocast import autocast_on, without_autocast
from ..tensors.graphs import leave_graphs
from .arguments import check_understood
from .handover import KeyOwner, forget_handover, from_outside, receive
from .observer import Queries

#: For `model.set_attn_implementation` and `from_pretrained(attn_implementation=...)`.
PAGED_EVICTION = "paged_eviction"


class ModelAttention:
    """The attention implementation that a model uses now; it may change after the cache was made.

    Attributes:
        config: config of the text part of the model.
        shows_queries: whether it is "paged_eviction", as of the last `look`.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.look()

    def look(self) -> None:
        """Update `shows_queries`. Called once per forward, because reading a configuration is slow."""
        self.shows_queries: bool = self.config._attn_implementation == PAGED_EVICTION

    @property
    def name(self) -> str | None:
        """Name of the implementation, such as "sdpa"."""
        name: str | None = self.config._attn_implementation
        return name

    @property
    def has_masks(self) -> bool:
        """Whether transformers builds masks for this implementation."""
        return self.name in AttentionMaskInterface()

    def __deepcopy__(self, memo: Any) -> "ModelAttention":
        return self  # a copied cache serves the same model


@contextmanager
def shown_queries(config: Any) -> Iterator[None]:
    """Context manager: the cache assumes that the attention of a model with this configuration shows its queries."""
    text = config.get_text_config(decoder=True)
    before = text._attn_implementation
    text._attn_implementation = PAGED_EVICTION
    try:
        yield
    finally:
        text._attn_implementation = before


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
    """Attention of one layer, with the signature that transformers expects.

    Args:
        query: `[batch, query_heads, q, dim]`.
        key, value: `[batch, kv_heads, tokens, dim]`.
        attention_mask: bool or additive, broadcastable to `[batch, query_heads, q, tokens]`; None = causal.
        softcap, s_aux: soft-capping and attention sinks; such models compute with their own eager function.

    Raises:
        ValueError: the model passes an argument that sdpa would ignore, or a mask that fits no layer.
    """
    if torch.compiler.is_compiling() and from_outside():
        leave_graphs()
    check_understood(module, kwargs, PAGED_EVICTION)
    owner = receive(module, query, key, value)
    if query.dtype != key.dtype and autocast_on(query.device):  # tokens came before autocast was on
        query = query.to(key.dtype)
    queries = Queries(query, key, Logits(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux))
    causal = is_causal(module, kwargs)
    order = noted(key) if query.shape[2] > 1 else None
    if order is None:
        mask, is_own = mask_of_call(attention_mask, owner, query, key, causal)
    else:
        check_own_mask(attention_mask)
        if dropout or softcap is not None or s_aux is not None or not order.readable(query, key, value):
            mask, order = order.mask(key, query.shape[2]), None
        else:
            mask = None
        is_own = True
    if is_own:  # some models work `is_causal` out from the mask that was not used
        causal = kwargs["is_causal"] = False
    beside = weights = None
    if owner is not None and owner.reads and (extra := owner.extra_attention(queries, value)) is not None:
        beside = extra.parts
        if extra.bias is not None:
            mask = biased(per_query_head(mask, query), extra.bias, query, key, causal)
    if not key.shape[2]:
        output = _read_in_place(module, owner, queries, mask, dropout)
    elif order is not None:
        output, lse = order.read(query, key, value, queries.logits.scaling)
        queries = replace(queries, lse=lse)
    elif beside is not None:
        output = _joined(queries, Part(key, value, as_bias(mask, key)), beside, dropout)
    elif softcap is not None or s_aux is not None:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        mask = additive(per_query_head(mask, query), query, key, causal)
        options = {"scaling": queries.logits.scaling, "softcap": softcap, "s_aux": s_aux, "dropout": dropout}
        output, weights = eager(module, query, key, value, mask, **options, **kwargs)
    elif query.shape[2] == 1 and (mask is not None or key.device.type == "cpu"):
        output = _single(queries, value, mask, dropout)
    elif mask is not None and is_own and 1 < mask.shape[1] == key.shape[1] and key.device.type == "cpu":
        output = _by_kv_head(queries, value, mask, dropout)
    else:
        mask, scaling = per_query_head(mask, query), queries.logits.scaling
        output, weights = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if owner is not None:
        owner.attended(queries)
    return output, weights


def _single(queries: Queries, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """sdpa of one query per row, `[batch, 1, query_heads, dim]`.

    Query heads that share a KV head are its queries: where there is a mask, compiled code would otherwise copy keys and
    values for each of them, and on a CPU the kernel for bfloat16 takes ten times as long for one query at a time.
    """
    query, key = queries.query, queries.key
    sets, tokens = key.shape[1:3]
    if mask is not None:
        mask = mask[..., :tokens]  # what hands over masks of all slots may hand over keys of some
        mask = mask if mask.shape[1] == 1 else mask.reshape(mask.shape[0], sets, -1, tokens)
    packed = query.reshape(query.shape[0], sets, -1, query.shape[-1])
    output = scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, dropout_p=dropout, scale=queries.logits.scaling
    )
    return output.reshape(output.shape[0], 1, query.shape[1], -1)


def _by_kv_head(queries: Queries, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """sdpa with a mask `[batch, kv_heads, q, tokens]`, one KV head after the other: `[batch, q, query_heads, dim]`.

    sdpa would turn the masks of all heads into floats at once, and keys and values would be copied for each query head:
    for a chunk of a long prompt that is more memory than what all layers hold. On other devices a loop costs more.
    """
    query, key = queries.query, queries.key
    outputs = []
    for head, of_group in enumerate(query.split(query.shape[1] // key.shape[1], dim=1)):
        keys, values = (states[:, head : head + 1].expand(-1, of_group.shape[1], -1, -1) for states in (key, value))
        seen, scale = mask[:, head : head + 1], queries.logits.scaling
        attended = scaled_dot_product_attention(of_group, keys, values, attn_mask=seen, dropout_p=dropout, scale=scale)
        outputs.append(attended.transpose(1, 2))
    return torch.cat(outputs, dim=2)


@without_autocast
def _read_in_place(
    module: torch.nn.Module, owner: KeyOwner | None, queries: Queries, mask: Tensor | None, dropout: float
) -> Tensor:
    reader = carried(queries.key)
    if reader is None or (owner is not None and not owner.kv_unchanged):
        raise ValueError(
            f"{type(module).__name__} copies or changes keys or values that the cache returned, which it did not do "
            "with the prompt, and what they carried is lost. Use allocator='uniform', one number as budget, and "
            "bits=None in a static cache."
        )
    if dropout:
        raise ValueError("Attention to codes, or to heads of different length, has no dropout: call model.eval().")
    return reader(queries.query, mask, queries.logits).to(queries.query.dtype)


@without_autocast
def _joined(queries: Queries, here: Part, beside: Iterable[Part | Read], dropout: float) -> Tensor:
    """Attention to what the cache returned and to what lies beside it, `[batch, q, query_heads, dim]`."""
    if dropout:
        raise ValueError("Attention that is read from several places has no dropout: call model.eval().")
    query, logits = queries.query, queries.logits
    reads = (part if isinstance(part, Read) else read(query, part, logits) for part in chain([here], beside))
    return join(reads, logits).to(query.dtype).transpose(1, 2).contiguous()


def _build_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    forget_handover()  # a forward begins: nobody will attend to what a failed one left behind
    return marked_mask(*args, **kwargs)


AttentionInterface.register(PAGED_EVICTION, paged_eviction_attention)
AttentionMaskInterface.register(PAGED_EVICTION, _build_mask)

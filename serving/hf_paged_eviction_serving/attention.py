"""Attention in continuous batching, where the KV heads of a request may hold different tokens."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from hf_paged_eviction.internals import Logits, Part, check_understood, join, read, visible_one_behind_the_other

#: For `model.set_attn_implementation`. Continuous batching makes no masks for it.
IN_PAGES = "paged_eviction_in_pages"

#: Arguments that continuous batching passes to attention.
_HARMLESS = frozenset(
    "block_table cu_seq_lens_k cu_seq_lens_q logits_indices logits_processor_args max_length_k max_length_q read_index "
    "write_index".split()
)


#: `waiting`: the layer whose tokens came last in this thread and were not attended to so far, and its attention.
_handover = threading.local()


def hand_over(layer_idx: int, attend: Callable[[Tensor, Logits], Tensor]) -> None:
    """Note that a layer got new tokens, for the next attention call."""
    _handover.waiting = layer_idx, attend


def attention_in_pages(
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
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it in continuous batching.

    Args:
        query: `[1, query_heads, new, dim]`, all requests one after the other.
        key, value: `[1, kv_heads, tokens, dim]`, as the cache returned them; not used for layers that evict.

    Raises:
        RuntimeError: the forward is not one of continuous batching.
        ValueError: the model passes an argument that would be ignored and changes the result.
    """
    pages = kwargs.pop("cache", None)
    if isinstance(pages, PagedAttentionCache):  # before 5.24 attention took the tokens in, not the layer
        key, value = pages.update(key, value, module.layer_idx, kwargs)
    if kwargs.get("cu_seq_lens_q") is None:
        raise RuntimeError(
            "While a manager of paged_batching uses this model, its attention reads pages, and the model cannot be "
            "called otherwise. Call it before the manager is created, or after the `with paged_batching(...)` block."
        )
    if dropout:
        raise ValueError("Attention to pages has no dropout: call model.eval().")
    check_understood(module, {name: argument for name, argument in kwargs.items() if name not in _HARMLESS}, IN_PAGES)
    logits = Logits(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    waiting = vars(_handover).pop("waiting", None)
    if waiting is not None and getattr(module, "layer_idx", waiting[0]) == waiting[0]:
        output: Tensor = waiting[1](query, logits)
        return output, None
    ends = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    seen = visible_one_behind_the_other(ends, query.shape[2], key.shape[2], getattr(module, "sliding_window", None))
    output = compare(query, key, value, seen[None, None], logits)
    return output.transpose(1, 2).contiguous(), None


def compare(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, logits: Logits, causal: bool = False
) -> Tensor:
    """Attention, where `G` query heads share a KV head.

    Args:
        query: `[B, query_heads, q, D]`.
        key, value: `[B, kv_heads, tokens, D]`.
        mask: `[B, kv_heads or 1, q or 1, tokens]` bool, True = visible; None = all.
        causal: use a causal mask; the queries are those of all tokens, in order, and `mask` must be None.

    Returns:
        `[B, query_heads, q, D]`.
    """
    if logits.softcap is not None or logits.sinks is not None:
        if causal:
            mask = torch.ones(1, 1, *[query.shape[2]] * 2, dtype=torch.bool, device=query.device).tril()
        bias = None if mask is None else torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
        return join([read(query, Part(key, value, bias), logits)], logits).to(query.dtype)
    rows, heads = key.shape[:2]
    grouped = query.unflatten(1, (heads, -1))  # [B, H, G, q, D]
    if query.shape[2] == 1:  # the query heads of a group take the place of queries: each key is read once
        output = scaled_dot_product_attention(grouped.squeeze(3), key, value, mask, scale=logits.scaling)
        return output.flatten(1, 2)[:, :, None]
    shown_k, shown_v = (tensor.flatten(0, 1)[:, None].expand(-1, grouped.shape[2], -1, -1) for tensor in (key, value))
    if mask is not None:
        mask = mask.expand(-1, heads, -1, -1).flatten(0, 1)[:, None]
    output = scaled_dot_product_attention(
        grouped.flatten(0, 1), shown_k, shown_v, mask, is_causal=causal, scale=logits.scaling
    )
    return output.view(rows, -1, *output.shape[2:])


AttentionInterface.register(IN_PAGES, attention_in_pages)

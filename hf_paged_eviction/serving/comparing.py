"""Attention to contiguous keys and values, with the logits of the model."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..attention.parts import Part, join, read
from ..attention.weights import Logits


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

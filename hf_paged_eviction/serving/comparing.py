"""Attention to keys and values that lie together, with whatever logits the model asks for."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..attention.weights import Logits


def compare(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, logits: Logits, sinks: Tensor | None = None
) -> Tensor:
    """Attention.

    Args:
        query: `[B, H, q, D]`.
        key, value: `[B, H, tokens, D]`.
        mask: bool, what is visible, of a shape that expands to `[B, H, q, tokens]`; None = all.
        sinks: logits that take part and belong to no token, of a shape that expands to `[B, H, q, 1]`.

    Returns:
        `[B, H, q, D]`.
    """
    if logits.softcap is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=logits.scaling)
    products = (query.float() * logits.scaling) @ key.float().mT
    if logits.softcap is not None:
        products = (products / logits.softcap).tanh() * logits.softcap
    if mask is not None:
        products = products.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        products = torch.cat([products, sinks.to(products).expand(*products.shape[:3], 1)], dim=-1)
    weights = products.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.float()).to(query.dtype)

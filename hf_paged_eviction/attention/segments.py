"""Attention of a single query to keys and values that lie in segments of different length, where they lie."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .weights import Logits


@dataclass(frozen=True)
class InSegments:
    """Keys and values of all rows and KV heads, one after the other.

    Attributes:
        keys, values: `[total, dim]`.
        lengths: slots of each segment: rows, then KV heads.
        empty: so many slots at the beginning of each hold no token; all others are visible.
        visible: `[rows, 1 or kv_heads, slots or more]` bool, the slots that hold a token; None = all but `empty`.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]
    empty: int = 0
    visible: Tensor | None = None

    @property
    def masks(self) -> "list[Tensor | None]":
        """Of each segment, `[1, 1, 1, tokens]`; None = all of its tokens are visible."""
        if self.visible is None:
            return [None] * len(self.lengths)
        rows = len(self.visible)
        visible = self.visible.expand(-1, len(self.lengths) // rows, -1).flatten(0, 1)
        return [mask[None, None, None, :length] for mask, length in zip(visible, self.lengths, strict=True)]

    def split(self, states: Tensor) -> tuple[Tensor, ...]:
        """Each segment of these `[total, dim]` without its empty slots, `[1, 1, tokens, dim]`."""
        if not self.empty:
            return torch.split(states[None, None], self.lengths, dim=2)
        sizes = [size for length in self.lengths for size in (self.empty, length - self.empty)]
        return torch.split(states[None, None], sizes, dim=2)[1::2]


def attend(query: Tensor, held: InSegments, logits: Logits) -> Tensor:
    """Attention of one query per row.

    Each segment is read alone: a product of its own for each row and KV head, and no copy of anything held.

    Args:
        query: `[batch, query_heads, 1, dim]`; `G` query heads share a KV head.

    Returns:
        `[batch, 1, query_heads, dim]`.
    """
    rows, heads = query.shape[:2]
    # All of four dimensions: others take a slower way.
    queries = query.reshape(len(held.lengths), 1, 1, -1, query.shape[-1]).unbind(0)  # per segment [1, 1, G, D]
    keys, values = held.split(held.keys), held.split(held.values)
    if logits.softcap is None and logits.sinks is None:
        outputs = [
            scaled_dot_product_attention(one, key, value, mask, scale=logits.scaling)
            for one, key, value, mask in zip(queries, keys, values, held.masks, strict=True)
        ]
    else:
        sinks = (
            [None] * len(queries) if logits.sinks is None else [*logits.sinks.view(-1, queries[0].shape[2], 1)] * rows
        )
        outputs = [
            _one(one, key, value, mask, logits, sink)
            for one, key, value, mask, sink in zip(queries, keys, values, held.masks, sinks, strict=True)
        ]
    return torch.cat(outputs).reshape(rows, 1, heads, -1).to(query.dtype)


def _one(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, logits: Logits, sinks: Tensor | None
) -> Tensor:
    """`[1, 1, G, dim]` of queries of that shape; `sinks` `[G, 1]` take part and belong to no token."""
    products = (query.float() * logits.scaling) @ keys.float().mT
    if logits.softcap is not None:
        products = (products / logits.softcap).tanh() * logits.softcap
    if mask is not None:
        products = products.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = products.softmax(-1)
    else:
        weights = torch.cat([products, sinks.float().expand(*products.shape[:3], 1)], dim=-1).softmax(-1)[..., :-1]
    return weights @ values.float()

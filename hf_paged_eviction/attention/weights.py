"""Attention weights for scoring."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..integration.heads import WHOLE, LocalHeads
from ..integration.rotary import Rotary
from ..masks.visible import visible


@dataclass(frozen=True)
class Logits:
    """Turns products of queries and keys into the logits of the softmax, as the model does.

    Attributes:
        scaling: factor on the products.
        softcap: bound of the logits (gemma2 and similar models); None = none.
        sinks: `[query_heads]`, a logit per head that takes part in the softmax and belongs to no token (gpt_oss).
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass
class Attention:
    """What consecutive queries of one layer attend to. `G` query heads share a KV head; all attention is causal.

    Attributes:
        queries: `[batch, query_heads, q, dim]` as attention gets them (after rotary embedding).
        keys: `[batch, kv_heads or query_heads, tokens, dim]`; latent attention (MLA) expands one per query head.
        query_positions: `[batch, q]` int64, -1 where a query does not count (a pad, or one observed before).
        key_positions: `[batch, kv_heads, tokens]` int64, -1 for a pad.
        logits: scaling, soft-capping and sinks.
        local_heads: where the layer's other KV heads are, for `all_heads`.
        rotary: the layer's rotation, for policies that need it (`Needs.rotary`); None where the layer does not rotate.
        lse: `[batch, query_heads, q]` float32, logarithm of the sum of exponentials of the logits of all that a query
            sees, if attention has returned it; None = unknown.
    """

    queries: Tensor
    keys: Tensor
    query_positions: Tensor
    key_positions: Tensor
    logits: Logits
    local_heads: LocalHeads = WHOLE
    rotary: Rotary | None = None
    lse: Tensor | None = None
    # Computed on first access. (`cached_property` takes a lock, which `torch.compile` cannot trace.)
    _visible: Tensor | None = field(default=None, init=False, repr=False)
    _weights: Tensor | None = field(default=None, init=False, repr=False)

    def all_heads(self, numbers: Tensor) -> Tensor:
        """Gather numbers `[batch, kv_heads, ...]` of these heads to `[batch, all KV heads of the layer, ...]`."""
        return self.local_heads.gather(numbers)

    @property
    def counts(self) -> Tensor:
        """`[batch, q]` bool, which queries count."""
        return self.query_positions >= 0

    @property
    def unrotated_queries(self) -> Tensor:
        """`[batch, query_heads, q, dim]`, float32 or wider, before rotary embedding."""
        if self.rotary is None:
            return self.queries.to(torch.promote_types(self.queries.dtype, torch.float32))
        return self.rotary.unrotate(self.queries, self.query_positions[:, None])

    @property
    def visible(self) -> Tensor:
        """`[batch, kv_heads, 1, q, tokens]` bool: the query counts, and the token is not after it."""
        if self._visible is None:
            self._visible = visible(self.key_positions, self.query_positions)[:, :, None]
        return self._visible

    @property
    def weights(self) -> Tensor:
        """`[batch, kv_heads, G, q, tokens]` float32; rows of queries that do not count are zero."""
        if self._weights is None:
            products = self._products()
            if self.logits.sinks is not None:
                sinks = self.logits.sinks.float().view(1, products.shape[1], -1, 1, 1).expand(*products.shape[:-1], 1)
                products = torch.cat([products, sinks], dim=-1)
            weights = products.softmax(-1)[..., : self.key_positions.shape[-1]]
            self._weights = weights.mul_(self.counts[:, None, None, :, None])
        return self._weights

    def largest_weights(self) -> Tensor:
        """`[batch, kv_heads, q, tokens]` float32: softmax of the largest logit of a group's query heads.

        Sinks take no part. Computed at each access.
        """
        weights = self._products().amax(2).softmax(-1)
        return weights * self.counts[:, None, :, None]

    def _products(self) -> Tensor:
        """Logits `[batch, kv_heads, G, q, tokens]` float32, far below any other where a token is not visible."""
        heads = self.key_positions.shape[1]
        # One product per key head, the queries of its group below each other: no key is copied. Then in place, since
        # this is most of what observing costs.
        grouped = self.queries.unflatten(1, (self.keys.shape[1], -1)).flatten(2, 3)
        if grouped.dtype == torch.float32:  # scaled while it is small; half precision would round
            products = grouped.mul(self.logits.scaling) @ self.keys.mT
        else:
            products = (grouped @ self.keys.mT).float().mul_(self.logits.scaling)
        products = products.unflatten(2, (-1, self.queries.shape[2])).flatten(1, 2).unflatten(1, (heads, -1))
        if self.logits.softcap is not None:
            products = products.div_(self.logits.softcap).tanh_().mul_(self.logits.softcap)
        # The smaller of both, not their sum: a logit that overflowed at an invisible token would survive a sum.
        # Positions are mostly the same for all heads: a view that repeats them.
        tokens = self.key_positions[:, :1] if self.key_positions.stride(1) == 0 else self.key_positions
        seen = visible(tokens, self.query_positions)[:, :, None]
        limited: Tensor = torch.minimum(products, torch.where(seen, float("inf"), -1e30), out=products)
        return limited


def far(attention: Attention, distance: int) -> Tensor:
    """Mean weights of each group of query heads, `[batch, kv_heads, q, tokens]`; 0 for tokens nearer than
    `distance`."""
    away = attention.query_positions[:, None, :, None] - attention.key_positions[:, :, None, :] >= distance
    return attention.weights.mean(2) * away

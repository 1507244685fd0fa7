"""Attention over tokens in several places: each place is read separately, and the outputs are joined.

Softmax over all tokens is the mean of the softmaxes over disjoint parts, weighted by the sums of their exponentials.
The places must not share a token.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors.pieces import per_piece
from .weights import Logits


@dataclass(frozen=True)
class Part:
    """Tokens that some queries attend to, beside those that the cache returned.

    Attributes:
        keys: `[batch, kv_heads, n, dim]`.
        values: as `keys`.
        bias: added to the logits, float32 and broadcastable to `[batch, kv_heads, q, n]`; -inf hides a token, whose
            value may be anything. None = all are visible.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Read:
    """The output of attention to some tokens.

    Attributes:
        output: `[batch, query_heads, q, dim]` float32.
        lse: `[batch, query_heads, q]` float32, logarithm of the sum of exponentials of the logits; -inf = nothing seen.
    """

    output: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Extra:
    """What attention reads in addition to the tokens that it was given: those in the slots, followed by the new ones if
    they are not in the table yet.

    Attributes:
        parts: additional keys and values, which are consumed one after the other; None = none. A token must not be in
            two places.
        bias: `[B, H, 1, tokens]` float32, added to the logits of the tokens that attention was given; None = nothing.
    """

    parts: Iterable[Part | Read] | None = None
    bias: Tensor | None = None


def read(query: Tensor, part: Part, logits: Logits) -> Read:
    """Attention to one part, in float32.

    Args:
        query: `[batch, query_heads, q, dim]`; `G` query heads share a KV head.
    """
    rows, heads, count, _ = query.shape
    size = per_piece(query.device, rows * heads * part.keys.shape[2])
    pieces = []
    for start in range(0, count, size):
        bias = part.bias
        if bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, start : start + size]
        pieces.append(_read(query[:, :, start : start + size], Part(part.keys, part.values, bias), logits))
    if len(pieces) == 1:
        return pieces[0]
    return Read(torch.cat([piece.output for piece in pieces], 2), torch.cat([piece.lse for piece in pieces], 2))


def _read(query: Tensor, part: Part, logits: Logits) -> Read:
    heads = part.keys.shape[1]
    grouped = query.unflatten(1, (heads, -1))  # [B, H, G, q, D]
    products = (grouped.float() * logits.scaling) @ part.keys.float()[:, :, None].mT
    if logits.softcap is not None:
        products = (products / logits.softcap).tanh() * logits.softcap
    values = part.values.float()
    if part.bias is not None:
        hidden = part.bias == float("-inf")
        products = (products + part.bias[:, :, None]).masked_fill(hidden[:, :, None], float("-inf"))
        if part.bias.shape[2] == 1:  # hidden values may be nan, and 0 x nan is nan
            values = values.masked_fill(hidden[:, :, 0, :, None], 0.0)
    lse = products.logsumexp(-1)
    weights = (products - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    return Read((weights @ values[:, :, None]).flatten(1, 2), lse.flatten(1, 2))


def join(reads: Iterable[Read], logits: Logits) -> Tensor:
    """Join the outputs of all parts as one softmax: `[batch, query_heads, q, dim]` float32. Parts are consumed one by
    one."""
    total: Read | None = None
    for part_read in reads:
        total = part_read if total is None else _join(total, part_read)
    if total is None:
        raise ValueError("There is nothing to attend to.")
    if logits.sinks is not None:  # a sink is a logit without a token
        lse = total.lse.logaddexp(logits.sinks.float()[None, :, None])
        return total.output * (total.lse - lse).exp()[..., None]
    return total.output


def _join(one: Read, other: Read) -> Read:
    lse = one.lse.logaddexp(other.lse)
    whole = lse.masked_fill(lse == float("-inf"), 0.0)
    share, rest = ((part_read.lse - whole).exp()[..., None] for part_read in (one, other))
    return Read(one.output * share + other.output * rest, lse)

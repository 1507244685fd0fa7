"""Scores of gates on their way to the policy: they take the place of the queries that the cache shows to it.

The cache keeps the queries of a token until they are observed, through padding, beams, `crop`, chunks and saved
contexts. A gate does not look at queries, so its scores travel in their place and need no bookkeeping of their own.
"""

import torch
from torch import Tensor

from hf_paged_eviction.internals import Attention, Logits, Queries

#: In place of the logits; no model scales its logits by 0.
_MARK = Logits(scaling=0.0)
#: Channels for one float32, so that narrow types lose nothing that matters.
_PARTS = 3


def in_place_of(queries: Queries, log_scores: Tensor) -> Queries:
    """Queries that hold the logarithms of scores, `[batch, kv_heads, q]` float32, of the type of the keys."""
    rows, heads, count = log_scores.shape
    states = queries.query.new_zeros(rows, heads, count, queries.query.shape[-1])
    rest = log_scores
    for part in range(_PARTS):
        states[..., part] = rest
        rest = rest - states[..., part].float()
    return Queries(states, queries.key, _MARK)


def log_scores_of(attention: Attention) -> Tensor | None:
    """The reverse of `in_place_of`, `[batch, kv_heads, q]` float32; None = these are queries of the model."""
    if attention.logits.scaling != 0.0:
        return None
    return attention.queries[..., :_PARTS].float().sum(-1).to(torch.float32)

"""The upper bound: evict what the rest of the text will attend to least, as the full cache has shown it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_paged_eviction import EvictionPolicy, ScoreContext
from hf_paged_eviction.internals import Attention, Queries

from ..caches.budgets import ORACLE
from ..errors import UserError
from .decoding import decode
from .generation import Judge
from .prefill import Inputs
from .recording import RecordingCache
from .start import Reader, Source


@dataclass(frozen=True, eq=False)
class Oracle(EvictionPolicy):
    """A token is worth the attention that it will still get from the question and the full cache's answer.

    Each query shares out 1 in each head; the score is the sum over the queries to come, the mean over the query heads
    of a KV head. Where the full cache's answer has ended, its last token decides. Tokens that the full cache never saw
    score 0. The sum is over single tokens taken one by one: no choice of `budget` tokens keeps more of this attention,
    but that is no proof that no other choice gives a better answer.

    Attributes:
        future: by layer `[rows, kv_heads, moments, positions]` float32, attention from the moment on.
        first: `[rows]` int64, position of the first query that counts.
        last: `[rows]` int64, the last moment of each row.
    """

    future: Mapping[int, Tensor]
    first: Tensor
    last: Tensor

    name = ORACLE

    def score(self, context: ScoreContext) -> Tensor:
        """The attention to come, by position."""
        table = self.future.get(context.layer_idx)
        if table is None:  # the answers are one token long: nothing attends to anything any more
            return torch.zeros_like(context.positions, dtype=torch.float32)
        if table.shape[:2] != context.positions.shape[:2]:
            raise ValueError(
                f"The oracle has looked ahead for {table.shape[0]} rows of {table.shape[1]} KV heads, and is asked "
                f"about {context.positions.shape[0]} of {context.positions.shape[1]}: make another one for other rows."
            )
        moment = (context.seen - self.first).clamp_min(0).minimum(self.last)
        now = table[torch.arange(len(table), device=table.device), :, moment]
        inside = (context.positions >= 0) & (context.positions < now.shape[-1])
        places = context.positions.clamp(0, now.shape[-1] - 1)
        return now.gather(-1, places).masked_fill(~inside, 0.0)

    def __deepcopy__(self, memo: Any) -> Oracle:
        return self  # never changed


def look_ahead(
    reader: Reader, inputs: Inputs, source: Source | None, limits: Sequence[int], judges: Sequence[Judge] = ()
) -> Oracle:
    """Answer with the full cache, and note what the questions and answers attend to.

    Args:
        inputs: every row with a context of its own.
        source: has read the contexts.
        limits: most tokens per row.
        judges: one per row, where an answer ends as soon as it is right.

    Raises:
        UserError: the model does not show its queries.
    """
    width = inputs.context_ids.shape[1]
    cache = RecordingCache(reader.model.config, since=width)
    start = reader.start(inputs, cache, source)
    decoding = decode(reader.generator, inputs, start, limits, judges=judges)
    queries = cache.stop()
    mask = torch.cat([inputs.mask, inputs.mask.new_ones(len(limits), cache.get_seq_length() - inputs.mask.shape[1])], 1)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, -1)
    # The last token of an answer is never fed; what is fed after it belongs to no answer.
    fed = torch.tensor([len(answer) - 1 for answer in decoding.answers], device=mask.device)
    ends = inputs.mask.sum(-1) + fed
    first = inputs.context_mask.sum(-1)
    query_positions = positions[:, width:].masked_fill(positions[:, width:] >= ends[:, None], -1)
    silent = [index for index, layer in enumerate(cache.layers) if type(layer) is DynamicLayer and index not in queries]
    if silent and query_positions.shape[1]:
        raise UserError("oracle: the queries of the model are not available; use --attn-implementation paged_eviction")
    future = {
        index: remaining(recorded, positions, query_positions, first, cache.layers[index].keys.shape[1])
        for index, recorded in queries.items()
    }
    return Oracle(future, first, (ends - first - 1).clamp_min(0))


def remaining(queries: Queries, positions: Tensor, query_positions: Tensor, first: Tensor, kv_heads: int) -> Tensor:
    """Attention that each position gets from the queries of a moment and later ones.

    Args:
        queries: of the last columns, and the keys of all.
        positions: `[rows, columns]` of the keys, -1 for a pad.
        query_positions: `[rows, q]`, -1 where one does not count.
        first: `[rows]` position of the first query that counts.
        kv_heads: of the cache.

    Returns:
        `[rows, kv_heads, moments, positions]` float32; moment `m` is that before the token `first + m` is fed.
    """
    rows, columns = positions.shape
    keys = positions[:, None].expand(-1, kv_heads, -1)
    weights = Attention(queries.query, queries.key, query_positions, keys, queries.logits).weights.mean(2)
    count = query_positions.shape[1]
    # Sort by position. Pads have none: they go to an extra last place, which is cut off.
    place = torch.where(positions >= 0, positions, columns)[:, None, None].expand(-1, kv_heads, count, -1)
    weights = weights.new_zeros(rows, kv_heads, count, columns + 1).scatter_(-1, place, weights)[..., :-1]
    moment = torch.where(query_positions >= 0, query_positions - first[:, None], count)[:, None, :, None].expand_as(
        weights
    )
    weights = weights.new_zeros(rows, kv_heads, count + 1, columns).scatter_(2, moment, weights)[:, :, :-1]
    return weights.flip(2).cumsum(2).flip(2)

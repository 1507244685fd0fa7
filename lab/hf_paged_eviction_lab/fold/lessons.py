"""What a layer's queries would read in a state of folded tokens, played on the full cache of a window of text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import Logits, Part, Queries, Read, feed, join, overheard, read

#: Queries of a window that are learned from.
_QUERIES = 256
#: Tokens of a forward behind the first.
_CHUNK = 64


@dataclass(frozen=True)
class Lesson:
    """What one layer should say to some queries of a window. One row.

    Attributes:
        queries: `[1, Q, q, D]`.
        keys, values: `[1, H, n, D]` of the tokens that leave at some time.
        folded: `[1, H, q, n]` bool, which of them have left before the query's forward.
        held: attention to the tokens that are held.
        target: `[1, Q, q, D]`, attention to all.
        logits: of the model.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    folded: Tensor
    held: Read
    target: Tensor
    logits: Logits


def spans(length: int, turn: int) -> list[tuple[int, int]]:
    """The forwards of a window: a prompt of a quarter, a half or three quarters of it, then chunks."""
    first = length * (1 + turn % 3) // 4
    starts = [0, *range(first, length, _CHUNK)]
    return list(zip(starts, [*starts[1:], length], strict=True))


def play(paged: Any, queries: Queries, keys: Tensor, values: Tensor, turn: int) -> Lesson | None:
    """Feed a window to an empty layer and note which token leaves when; None if none does."""
    length = keys.shape[2]
    never = length + 1
    leaves = torch.full((1, keys.shape[1], length), never, device=keys.device)
    turn_of = torch.zeros(length, dtype=torch.int64, device=keys.device)
    for number, (start, stop) in enumerate(spans(length, turn)):
        turn_of[start:stop] = number
        all_keys, _ = paged.update(keys[:, :, start:stop], values[:, :, start:stop])
        if paged.recorder is not None:
            paged.attended(Queries(queries.query[:, :, start:stop], all_keys, queries.logits))
        held = torch.zeros_like(leaves, dtype=torch.bool).scatter(-1, paged.positions, True)
        gone = ~held & (torch.arange(length, device=keys.device) < stop) & (leaves == never)
        leaves = leaves.masked_fill(gone, number)
    folded = leaves[:, :, None] < turn_of[:, None]
    some = folded.any(-1).all(1)[0].nonzero()[:, 0]
    if not len(some):
        return None
    some = some[torch.linspace(0, len(some) - 1, min(_QUERIES, len(some)), device=some.device).long()]
    asking, folded = queries.query[:, :, some], folded[:, :, some]
    later = torch.arange(length, device=keys.device) > some[:, None]
    hidden = torch.where(later, float("-inf"), 0.0)[None, None]
    full = read(asking, Part(keys, values, hidden), queries.logits)
    held_read = read(asking, Part(keys, values, hidden.masked_fill(folded, float("-inf"))), queries.logits)
    ever = folded.any(2).any(1)[0]
    tensors = (
        asking,
        keys[:, :, ever],
        values[:, :, ever],
        held_read.output,
        held_read.lse,
        join([full], queries.logits),
    )
    with torch.inference_mode(False):  # for good, so that something can be learned from it
        asking, keys, values, output, lse, target = (tensor.detach().float().clone() for tensor in tensors)
        sinks = None if queries.logits.sinks is None else queries.logits.sinks.detach().clone()
        logits = Logits(queries.logits.scaling, queries.logits.softcap, sinks)
        return Lesson(asking, keys, values, folded[..., ever].clone(), Read(output, lse), target, logits)


def lessons(
    model: Any, tokens: Tensor, cache: PagedEvictionCache, turn: int, layers: Sequence[int]
) -> dict[int, Lesson]:
    """Let the model read a window `[1, length]` with its full cache: by layer what there is to learn.

    Args:
        model: with the attention implementation "paged_eviction".
        cache: an empty one that evicts.
        turn: number of the window.
        layers: which to look at.
    """
    paged, by_layer = dict(cache.paged_layers), {}

    def hear(index: int, queries: Queries, keys: Tensor, values: Tensor) -> None:
        lesson = play(paged[index], queries, keys, values, turn)
        if lesson is not None:
            by_layer[index] = lesson

    with torch.inference_mode():
        feed(model, tokens, None, overheard(model, hear, layers))
    return by_layer

"""Prompts as padded tensors, read into a cache, and how one reading fills many caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_paged_eviction.internals import PagedLayer, Queries, Spans
from hf_paged_eviction.internals import feed as feed_model

from ..data.prompting.prompts import Prompt

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Inputs:
    """The prompts of some rows: left-padded contexts, and left-padded questions after them.

    Attributes:
        ids, mask: `[rows, columns]`; the mask is zero where a pad is, in the middle too.
        contexts: the different contexts, which are read first; if no questions follow, the whole prompt of each row.
        context_ids, context_mask: `[contexts, columns]`, these, padded: the first columns of `ids` and `mask`.
        spread: `[rows]` int64, index of the context of each row; None if every row has its own.
        chat: the first of them is wrapped in the chat template, as are all prompts of a task.
        protected: of each context, see `Prompt`.
    """

    ids: Tensor
    mask: Tensor
    contexts: tuple[Ids, ...]
    context_ids: Tensor
    context_mask: Tensor
    spread: Tensor | None
    chat: bool = False
    protected: tuple[Spans, ...] = ()

    @classmethod
    def of(cls, prompts: Sequence[Prompt], device: torch.device) -> Inputs:
        """Pad these prompts together. Either all of them have a question that is fed afterwards, or none."""
        contexts = [prompt.context for prompt in prompts]
        # Where the prompt is read as a whole, every row has its own answer from it.
        different = list(dict.fromkeys(contexts)) if prompts[0].question else contexts
        place = {context: index for index, context in enumerate(different)}
        protected = {prompt.context: prompt.protected for prompt in prompts}
        spread = None if len(different) == len(contexts) else torch.tensor([place[context] for context in contexts])
        context_ids, context_mask = pad_left(different, device)
        question_ids, question_mask = pad_left([prompt.question for prompt in prompts], device)
        rows: Tensor | slice = slice(None) if spread is None else spread.to(device)
        return cls(
            ids=torch.cat([context_ids[rows], question_ids], dim=1),
            mask=torch.cat([context_mask[rows], question_mask], dim=1),
            contexts=tuple(different),
            context_ids=context_ids,
            context_mask=context_mask,
            spread=spread,
            chat=prompts[0].chat,
            protected=tuple(protected[context] for context in different),
        )

    def extended(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and mask with `tokens` `[rows, n]` after the prompts."""
        tokens = tokens.to(self.ids.device)
        return torch.cat([self.ids, tokens], dim=1), torch.cat([self.mask, torch.ones_like(tokens)], dim=1)


def pad_left(rows: Sequence[Ids], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both `[rows, longest]` int64, padded on the left.

    The pads of a row repeat its first token, so that a repetition penalty, which some checkpoints ask for, penalises
    no token that is not in the row.
    """
    longest = max(map(len, rows))
    ids = torch.tensor([list(row[:1]) * (longest - len(row)) + list(row) for row in rows], dtype=torch.int64)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], dtype=torch.int64)
    return ids.view(len(rows), longest).to(device), mask.view(len(rows), longest).to(device)


@contextmanager
def after_forwards(model: Any, told: Callable[[Any, Any], object] | None) -> Iterator[None]:
    """Within, `told` gets the token ids and the output of every forward, where somebody is to be told."""
    if told is None:
        yield
        return

    def hook(module: Any, args: Any, named: dict[str, Any], output: Any) -> None:
        told(named.get("input_ids", args[0] if args else None), output)

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@torch.inference_mode()
def feed(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Feed tokens `[rows, n]` to the model, into the cache; the logits `[rows, vocabulary]` after the last one.

    Args:
        mask: `[rows, seen + n]`, for all that the cache has seen and the new tokens.
    """
    return feed_model(model, ids, mask, cache)[:, -1]


def read(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache, chunk: int | None = None) -> None:
    """Feed left-padded prompts `[rows, n]` to an empty cache, `chunk` tokens per forward or all at once."""
    step = chunk or ids.shape[1]
    for start in range(0, ids.shape[1], step):
        feed(model, ids[:, start : start + step], mask[:, : start + step], cache)


def can_share(cache: DynamicCache) -> bool:
    """Whether keys, values and queries are all that the layers of this cache remember of a prompt, in or out of use."""
    simple = (DynamicLayer, DynamicSlidingWindowLayer, PagedLayer)
    return all(type(layer) in simple and not layer.is_compileable for layer in cache.layers)


@torch.inference_mode()
def replay(
    source: DynamicCache, target: DynamicCache, rows: Tensor, width: int, queries: Mapping[int, Queries]
) -> None:
    """Give an empty cache what `source` holds of some rows, layer by layer, exactly as a prefill would.

    Args:
        rows: `[n]` int64, which rows.
        width: number of the last columns that are copied; the others are pads in all these rows.
        queries: of the columns of `source`, by layer, for the layers of the target whose policy or disposal needs
            attention.
    """

    def part(states: Tensor) -> Tensor:
        states = states[:, :, -width:]
        return states if rows.tolist() == list(range(len(states))) else states[rows.to(states.device)]

    target.get_mask_sizes(width, 0)  # as a forward does; the cache knows its pads already
    for index, layer in enumerate(source.layers):
        keys, values = target.update(part(layer.keys), part(layer.values), index)
        observed = target.layers[index]
        if type(observed) is DynamicSlidingWindowLayer:
            observed.cumulative_length = width  # of which the window alone is there
        if isinstance(observed, PagedLayer) and observed.recorder is not None:
            # As attention does: after this layer's update, before the next one's.
            chunk_queries = Queries(part(queries[index].query), keys, queries[index].logits)
            observed.extra_attention(chunk_queries, values)
            observed.attended(chunk_queries)

"""Prompt queries that wait before they attend (Attendre, arXiv 2401.04881), for encoders and prefix models."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_paged_eviction.internals import HARMLESS, paged_eviction_attention, using, whole_number, why_not_ours

from .delayed import Evict, delayed_attention

#: The attention implementation of a model while it is inside `query_memory`.
QUERY_MEMORY = "query_memory"


@dataclass
class _Memory:
    """Sizes, whose attention they are for, and how often it was asked."""

    modules: frozenset[int]
    sizes: dict[str, Any]
    prefix: bool
    calls: int = 0


class _Active(threading.local):
    memory: _Memory | None = None


_active = _Active()


@contextmanager
def query_memory(
    model: Any,
    *,
    queries: int,
    keys: int,
    chunk: int = 64,
    evict: Evict = "fifo",
    prefix: bool = False,
) -> Iterator[None]:
    """Inside, the model's encoder attends with a query memory (Attendre, arXiv 2401.04881).

    In every layer the text passes in chunks. Keys and values go to a memory of `keys` tokens, and the
    least valuable of them leave. A query waits until `queries` later tokens have come, and only then attends to what
    the memory holds: it sees what follows it in the text, with attention that grows with the memory and not with the
    square of the text. With memories as long as the text this is full bidirectional attention.

    Where a query may not see what follows it, there is nothing to wait for: causal models are refused, unless
    `prefix=True` says that this one was trained to read its prompt in both directions (a prefix model). Then the first
    forward, the prompt, is delayed and all later ones are causal.

    Differences from the paper: layers are not interleaved (each finishes the text before the next begins, with the
    same result), so hidden states of the whole text are in memory; "lra" and "lfa" are our definitions, those of the
    policies of these names, as the paper's are not published; at the end of a text the waiting queries see what the
    memory then holds. The paper trains with it. A model that was not has to be measured: see the documentation.

    Args:
        model: an encoder-decoder or an encoder, in evaluation mode; with `prefix=True` a decoder.
        queries: how many tokens later a query attends; 0 = when its chunk has come.
        keys: tokens in the memory of keys and values, more than `queries`; `chunk` more while a chunk is read.
        chunk: tokens that come at once.
        evict: what leaves the memory: "fifo" = the oldest, "lra" = the least recently attended, "lfa" = the least
            frequently attended.
        prefix: see above.

    Raises:
        TypeError, ValueError: sizes, a causal model, or one whose attention is not plain (relative bias, windows).
        RuntimeError: inside, the encoder ran and never asked for this attention.
    """
    memory = _checked(model, queries, keys, chunk, evict, prefix)
    before = _active.memory
    hook = _part(model, prefix).register_forward_hook(_check_asked)
    try:
        with using(model, QUERY_MEMORY):
            _active.memory = memory
            yield
    finally:
        _active.memory = before
        hook.remove()


def _checked(model: Any, queries: int, keys: int, chunk: int, evict: Evict, prefix: bool) -> _Memory:
    queries, keys = whole_number("queries", queries, 0), whole_number("keys", keys, 1)
    chunk = whole_number("chunk", chunk, 1)
    if keys <= queries:
        raise ValueError(
            f"keys={keys} and queries={queries}: when a query attends, {queries} later tokens have come, so the memory "
            "would hold nothing before it. Make keys larger than queries."
        )
    if evict not in ("fifo", "lra", "lfa"):
        raise ValueError(f'evict must be "fifo", "lra" or "lfa", got {evict!r}.')
    reason = why_not_ours(model.config)
    if reason is not None:
        raise ValueError(f"{reason}, so its queries cannot be made to wait.")
    part = _part(model, prefix)
    modules = [module for module in part.modules() if hasattr(module, "is_causal")]
    if prefix and model.config.is_encoder_decoder:
        raise ValueError("prefix=True is for decoders; this model has an encoder, which needs no such word.")
    if not prefix and any(module.is_causal for module in modules):
        raise ValueError(
            f"{model.config.model_type} is causal: a query may not see what comes after it, so it has nothing to wait "
            "for. A model that was trained to read its prompt in both directions takes prefix=True."
        )
    sizes = {"chunk": chunk, "queries": queries, "keys": keys, "evict": evict}
    return _Memory(frozenset(map(id, part.modules())), sizes, prefix)


def _part(model: Any, prefix: bool) -> torch.nn.Module:
    """Whose attention is delayed."""
    part: torch.nn.Module = model.get_encoder() if model.config.is_encoder_decoder and not prefix else model
    return part


def _check_asked(module: torch.nn.Module, *_: Any) -> None:
    if _active.memory is not None and not _active.memory.calls:  # other threads have none, and nothing waits there
        raise RuntimeError(
            f"{type(module).__name__} computed attention by code of its own, so no query has waited. Only models that "
            "use transformers' attention interface can be served."
        )


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    memory = _active.memory
    ours = memory is not None and id(module) in memory.modules
    if memory is not None and ours:
        memory.calls += 1
    after_prefix = memory is not None and memory.prefix and (query.shape[2] == 1 or query.shape[2] != key.shape[2])
    if memory is None or not ours or after_prefix:
        return paged_eviction_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    _check_plain(module, kwargs)
    real = _real(module, attention_mask)
    real = real if real is None else real.expand(len(query), -1)
    output = delayed_attention(query, key, value, **memory.sizes, real=real, scaling=scaling)
    return output.transpose(1, 2).contiguous(), None


def _check_plain(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what the queries that wait would be without."""
    harmless = HARMLESS - {"sliding_window"}
    for name, value in kwargs.items():
        if (value is not None and name not in harmless) or (name == "dropout" and value):
            raise _unknown(module, name)


def _real(module: torch.nn.Module, mask: Tensor | None) -> Tensor | None:
    """`[rows or 1, n]` bool, which keys are no pads; None = all are."""
    if mask is None:
        return None
    visible = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    if mask.shape[1] != 1 or not (visible | hidden).all():
        raise _unknown(module, "a bias in its mask")
    # Of a causal mask the last query sees every real token, of any other all queries do.
    return visible[:, 0].any(1)


def _unknown(module: torch.nn.Module, what: str) -> ValueError:
    return ValueError(
        f"{type(module).__name__} attends with {what}, which a query memory does not know: the result would be wrong."
    )


AttentionInterface.register(QUERY_MEMORY, _attention)
AttentionMaskInterface.register(QUERY_MEMORY, sdpa_mask)

__all__ = ["QUERY_MEMORY", "query_memory"]

"""Compress a context by asking the model to repeat it (KVzip, arXiv 2505.23416)."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..cache import PagedEvictionCache
from ..integration.feeding import feed
from ..layer.paged import PagedLayer
from ..policies import EvictionPolicy
from ..table.budget import whole_number
from ..tensors.autocast import without_autocast

#: The instruction of KVzip.
REPEAT = "\n\nRepeat the previous context exactly."


@torch.no_grad()
def compress_by_probe(
    model: Any,
    cache: PagedEvictionCache,
    budget: int,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    probe_ids: Sequence[int],
    chunk_size: int = 2048,
) -> None:
    """Read a context, keep what the model needs to repeat it, and shrink the cache to `budget`.

    Afterwards the cache is as after a prompt: pass it to `generate` with the ids of context and question. The
    compression does not know the question, so one compressed context serves many (use a deepcopy for each).

    The context is read in chunks, into a cache with room for all of it. Its attention to itself is forgotten. Then, for
    each chunk, the model reads the probe and the chunk again, at the positions after the context, and the policy
    observes what these queries attend to in the context. These tokens are taken back. With policy="kvzip" the score of
    a token is the largest attention weight that it got.

    Differences from the paper (KVzip, arXiv 2505.23416): each layer, or with an allocator each head, has a budget of
    its own, where the paper uses one threshold for all; the softmax is over the whole context and the probe; all chunks
    have the same probe; and the cache protects the tokens that it always protects.

    Cost: the context is read twice, the second time with all of it in view. Peak memory: keys and values of the whole
    context in all layers, a copy of one layer, and activations of `len(probe_ids) + chunk_size` tokens. The storage
    shrinks layer by layer.

    Args:
        model: uses the attention implementation "paged_eviction".
        cache: empty, with a `budget` of at least the length of the context in all layers.
        budget: number of tokens held per layer and row in the end, see `PagedEvictionCache.shrink`.
        input_ids: `[rows, length]`, left-padded.
        attention_mask: `[rows, length]`, nonzero = real token; None = all are real.
        probe_ids: tokens that ask the model to repeat, such as those of `REPEAT`. For an instruct model with the
            context in the user's turn, include what the chat template writes between that turn and the answer.
        chunk_size: tokens per forward. Chunks are counted from the end, so rows of a batch are cut as if alone.

    Raises:
        TypeError, ValueError: the cache has no room or is not empty, the policy does not support a probe, or ids and
            mask do not fit. Nothing has been read then.
    """
    probe_context(model, cache, budget, input_ids, attention_mask, probe_ids=probe_ids, chunk_size=chunk_size)
    cache.shrink(budget)


@torch.no_grad()
def probe_context(
    model: Any,
    cache: PagedEvictionCache,
    budget: int,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    probe_ids: Sequence[int],
    chunk_size: int,
) -> None:
    """The steps of `compress_by_probe` before the cache is shrunk."""
    mask = _checked_mask(input_ids, attention_mask)
    probe = _checked_probe(probe_ids, chunk_size)
    _check_cache(cache, input_ids.shape[1])
    cache.check_shrink(budget)
    chunks = [(max(stop - chunk_size, 0), stop) for stop in range(input_ids.shape[1], 0, -chunk_size)][::-1]
    for start, stop in chunks:
        feed(model, input_ids[:, start:stop], mask[:, :stop], cache)
    for _, layer in cache.paged_layers:
        layer.forget_attention()
    for start, stop in chunks:
        ids, real = _repeated(probe, input_ids[:, start:stop], mask[:, start:stop])
        feed_probe(model, cache, ids, torch.cat([mask, real], dim=1))


@torch.no_grad()
def feed_probe(model: Any, cache: PagedEvictionCache, ids: Tensor, mask: Tensor | None) -> None:
    """Feed tokens, observe their attention to the held tokens, and take them back. They leave no other trace.

    Args:
        ids: `[rows, n]`.
        mask: `[rows, seen + n]`, nonzero = real token; None = all are.
    """
    layers, paged = list(cache.layers), [layer for _, layer in cache.paged_layers]
    recording = [layer.record_past for layer in paged]
    linear = [_linear_state(layer) for layer in paged]
    with cache.forward_aside():
        try:
            # What comes waits in the paged layers for `crop`, and goes with copies of linear states and other layers.
            cache.layers[:] = copy.deepcopy(layers, {id(layer): layer for layer in paged})
            for layer, state in zip(paged, linear, strict=True):
                layer.__dict__.update(copy.deepcopy(state))
                layer.activate_past_recording()
            feed(model, ids, mask, cache)
            for layer in paged:
                _observe_waiting(layer)
                PagedLayer.crop(layer, -ids.shape[1])  # not of a linear state
        finally:
            for layer, before, state in zip(paged, recording, linear, strict=True):
                layer.record_past = before
                layer.__dict__.update(state)
            cache.layers[:] = layers


def _linear_state(layer: PagedLayer) -> dict[str, Any]:
    """The attributes of the linear state that is beside a layer's keys and values; empty if there is none."""
    names = vars(LinearAttentionLayer()) if isinstance(layer, LinearAttentionLayer) else ()
    return {name: vars(layer)[name] for name in names if name in vars(layer)}


@without_autocast
def _observe_waiting(layer: PagedLayer) -> None:
    """Observe the queries of pending tokens, whether or not `crop` takes the tokens back."""
    if layer.recorder is not None:
        layer.recorder.observe_passing(layer.table, layer.state.pending)


def _repeated(probe: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Join the probe and a part of the context, with the pads on the right, so that nothing is between context and
    probe.

    Args:
        probe: `[n]`.
        ids, mask: `[rows, count]`, pads on the left.

    Returns:
        Ids and mask `[rows, n + count]`.
    """
    count = ids.shape[1]
    pads = count - mask.sum(1, keepdim=True)
    places = torch.arange(count, device=ids.device)
    ids = ids.gather(1, (places + pads).clamp_max(count - 1))
    real = (places < count - pads).to(mask.dtype)
    # Shorter rows do not take part in the first chunks.
    asks = real[:, :1].expand(-1, len(probe))
    return torch.cat([probe.to(ids).expand(len(ids), -1), ids], dim=1), torch.cat([asks, real], dim=1)


def _checked_mask(ids: Tensor, mask: Tensor | None) -> Tensor:
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"input_ids must be [rows, length] with at least one token, got shape {tuple(ids.shape)}.")
    if mask is None:
        return torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)} and input_ids {tuple(ids.shape)}.")
    mask = mask.to(ids.device).ne(0).to(ids.dtype)
    if (mask[:, 1:] < mask[:, :-1]).any() or not mask[:, -1].all():
        raise ValueError("The context must be padded on the left, and each row must have at least one token.")
    return mask


def _checked_probe(probe_ids: Sequence[int], chunk_size: int) -> Tensor:
    whole_number("chunk_size", chunk_size, 1)
    probe = torch.as_tensor(probe_ids, device="cpu")
    if probe.ndim != 1 or not len(probe) or probe.is_floating_point():
        raise ValueError(f"probe_ids must be the ids of one text, at least one, got {probe_ids!r}.")
    return probe


def _check_cache(cache: PagedEvictionCache, length: int) -> None:
    if not isinstance(cache, PagedEvictionCache):
        raise TypeError(f"cache must be a PagedEvictionCache, got {type(cache).__name__}.")
    check_probed(cache.policy)
    if cache.get_seq_length():
        raise ValueError("The cache has read something already: use a new one for each context.")
    for index, layer in cache.paged_layers:
        tokens = layer.budget.tokens
        if tokens is None or tokens < length:
            room = "a share of the prompt" if tokens is None else f"{tokens} tokens"
            raise ValueError(
                f"The context of {length} columns has to be read as a whole before it is compressed, and layer {index} "
                f"holds {room}. Make the cache with a larger budget=; compress_by_probe shrinks it."
            )


def check_probed(policy: EvictionPolicy) -> None:
    """Refuse a policy that does not use a probe, or would use it wrongly.

    Raises:
        ValueError: not supported; the message gives the reason.
    """
    needs = policy.needs
    if not needs.token_statistics:
        raise ValueError(
            f"The policy {policy.label!r} has no statistics of attention, so a probe does not help it. Use "
            "'kvzip', or call cache.shrink(budget) after the prompt."
        )
    if needs.row_statistics or needs.window is not None:
        raise ValueError(
            f"The policy {policy.label!r} depends on the positions of queries in the text, and a probe is not part "
            "of the text. Use 'kvzip'."
        )

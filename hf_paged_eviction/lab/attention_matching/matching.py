"""Compress what a cache has read, and let the values of the tokens that stay say what all of them did."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...attention.weights import Logits
from ...cache import PagedEvictionCache
from ...disposals import Drop
from ...integration.models import is_latent_attention
from ...layer.paged import PagedLayer
from ...recipes.procedures.probe import probe_context
from .values import Head, fitted_values


@dataclass(frozen=True)
class _Asked:
    """What one chunk of the probe asked of a layer: queries `[batch, query_heads, n, dim]`, which of them are real
    (`[batch, n]` bool, None = all), and how products become logits."""

    queries: Tensor
    real: Tensor | None
    logits: Logits

    def of(self, row: int, head: int, heads: int) -> Tensor:
        """The real ones of a row's KV head, `[queries, dim]` float32."""
        found: Tensor = self.queries[row].unflatten(0, (heads, -1))[head].float()
        return (found if self.real is None else found[:, self.real[row]]).flatten(0, 1)


@dataclass(frozen=True)
class _Whole:
    """All that a layer held: keys and values `[batch, kv_heads, held, dim]`, positions `[batch, kv_heads, held]`."""

    keys: Tensor
    values: Tensor
    positions: Tensor


@torch.no_grad()
def compress_by_matching(
    model: Any,
    cache: PagedEvictionCache,
    budget: int,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    probe_ids: Sequence[int],
    chunk_size: int = 2048,
    ridge: float = 1.0,
) -> None:
    r"""As `recipes.procedures.probe.compress_by_probe`, and then the tokens that stay get other values.

    For every row, layer and KV head, with the queries :math:`q` of the repeated context as a reference, those are
    sought with which attention to the tokens that stay gives what attention to all tokens gave:

    .. math:: \min_C \sum_q \bigl\| a_S(q) C - a(q) V \bigr\|^2 + \lambda \| C - V_S \|^2

    where :math:`a` are the weights of the softmax over the whole context and :math:`a_S` those of one over the tokens
    that stay. The ridge leaves alone what few queries ask for. Where nothing goes, nothing changes.

    It is the last step of Attention Matching (arXiv 2602.16284). Left out are its biases, which gained nothing in
    addition (see the docs), and its order layer by layer, which changed nothing: all layers are fitted to what the
    full cache was asked. So what comes out is an ordinary cache of as many bytes: it can be saved, copied, continued
    and asked as any other.

    Cost: that of `compress_by_probe`, and for each head one product of all queries with all keys and one solution of
    as many equations as tokens stay. Peak memory: besides, a copy of all keys and values, and all queries of the
    probe.

    Args:
        model, cache, budget, input_ids, attention_mask, probe_ids, chunk_size: see `compress_by_probe`.
        ridge: in queries that pay all their attention to the token.

    Raises:
        TypeError, ValueError: as `compress_by_probe`; the ridge is not above 0; the model attends to latents; tokens
            stand at the places of the cache, or what leaves is kept. Nothing was read then.
    """
    _check(model, cache, ridge)
    asked: dict[int, list[_Asked]] = {}

    def note(layer: PagedLayer) -> None:
        pending, listener = layer.contents.pending, layer.listener
        if pending is not None and listener is not None and listener.queries is not None:
            found = _Asked(listener.queries.query, pending.real, listener.queries.logits)
            asked.setdefault(layer.layer_idx, []).append(found)

    probe_context(
        model, cache, budget, input_ids, attention_mask, probe_ids=probe_ids, chunk_size=chunk_size, note=note
    )
    whole = {index: _whole(layer) for index, layer in cache.paged_layers}
    cache.shrink(budget)
    for index, layer in cache.paged_layers:
        _refit(layer, whole.pop(index), asked.pop(index), ridge)


def _check(model: Any, cache: PagedEvictionCache, ridge: float) -> None:
    if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not ridge > 0:
        raise ValueError(f"ridge must be a number above 0, got {ridge!r}: without one, few queries decide many values.")
    if is_latent_attention(model.config):
        raise ValueError("The model caches latents (MLA), of which keys and values are made: use compress_by_probe.")
    if not isinstance(cache, PagedEvictionCache):
        return  # is refused in a moment
    if not isinstance(cache.disposal, Drop):
        raise ValueError(
            f"Tokens that leave are made up for by those that stay, and disposal={cache.disposal.label!r} keeps "
            "them besides: use disposal='drop'."
        )
    if any(layer.store.turning is not None for _, layer in cache.paged_layers):
        raise ValueError(
            "Values are fitted to queries at their distance in the text, and positions='cache' changes the distances "
            "when tokens go: use positions='text'."
        )


def _whole(layer: PagedLayer) -> _Whole:
    keys, values = layer.store.read(layer.held)
    return _Whole(keys.clone(), values.clone(), layer.positions.clone())


def _refit(layer: PagedLayer, whole: _Whole, asked: Sequence[_Asked], ridge: float) -> None:
    """Give the tokens that the layer holds now other values."""
    positions = layer.positions
    values = layer.store.read(layer.held)[1].clone()
    changed = torch.zeros_like(positions, dtype=torch.bool)
    heads = positions.shape[1]
    for row in range(len(positions)):
        for head in range(heads):
            there, stays = whole.positions[row, head] >= 0, positions[row, head] >= 0
            kept = torch.searchsorted(whole.positions[row, head][there], positions[row, head][stays])
            if len(kept) == int(there.sum()):
                continue
            states = Head(whole.keys[row, head][there].float(), whole.values[row, head][there].float(), kept)
            queries = (each.of(row, head, heads) for each in asked)
            found = fitted_values(states, queries, asked[0].logits, ridge)
            values[row, head, stays] = found.to(values.dtype)
            changed[row, head] = stays
    layer.store.give_values(values, changed)

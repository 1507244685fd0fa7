"""Fit a basis: windows of text stream through the model, sums of products are kept, eigenvectors are found.

Of a token nothing is kept. What a direction is worth is for values its share of their variance. For keys it is the
share of the variance of the products with queries, because that is what attention reads: with C the mean of q q^T and K
the covariance of the keys, the directions are eigenvectors of C^(1/2) K C^(1/2).

Keys are taken as they are cached, after rotation, so that reading needs no positions.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction.internals import (
    PAGED_EVICTION,
    Queries,
    feed,
    is_latent_attention,
    map_tensors,
    model_fingerprint,
    overheard,
    paged_layers,
    text_facts,
    using,
)

from ..fitted import Progress, no_progress
from .basis import Axes, Basis, LayerBasis

#: What is added to the queries' mean square in every direction, as a share of it: directions that no query of the text
#: looked at may matter in another.
_RIDGE = 1e-2


@dataclass(frozen=True)
class Sums:
    """Sums over the tokens of a layer, float64.

    Attributes:
        count: `[1]`, tokens.
        keys, values: `[kv_heads, dim]`.
        key_squares, value_squares, query_squares: `[kv_heads, dim, dim]`, of products of two channels.
    """

    count: Tensor
    keys: Tensor
    values: Tensor
    key_squares: Tensor
    value_squares: Tensor
    query_squares: Tensor


def fit_basis(model: Any, windows: Sequence[Tensor], progress: Progress = no_progress) -> Basis:
    """The basis of some windows of text. The model is left as it was found.

    Its attention implementation is "paged_eviction" meanwhile. The fact "variance" tells by layer which share of the
    variance the first quarter, half and three quarters of the directions hold: of the products of keys with queries,
    and of the values.

    Args:
        model: a decoder, in evaluation mode.

    Raises:
        ValueError: a model that caches latents (MLA), or has no layer that evicts; or fewer tokens than a head has
            channels.
    """
    sums = sum_products(model, windows, progress)
    layers, shares = {}, {}
    for index, of in sorted(sums.items()):
        layers[index], shares[index] = solve(of)
    facts = {**text_facts(windows), "variance": json.dumps(shares)}
    return Basis(layers, model_fingerprint(model), facts)


def sum_products(model: Any, windows: Sequence[Tensor], progress: Progress = no_progress) -> Mapping[int, Sums]:
    """What the model shows in windows of text, by layer; see `fit_basis`."""
    if is_latent_attention(model.config):
        raise ValueError("This model caches latents instead of keys and values (MLA), which are of low rank already.")
    if not paged_layers(model.config):
        raise ValueError("No layer of this model can evict: there is nothing to fit.")
    sums: dict[int, Sums] = {}

    def hear(index: int, queries: Queries, keys: Tensor, values: Tensor) -> None:
        new = _sums(queries.query, keys, values)
        sums[index] = map_tensors(torch.add, sums[index], new) if index in sums else new

    with using(model, PAGED_EVICTION), torch.inference_mode():
        for done, window in enumerate(windows, 1):
            feed(model, window, None, overheard(model, hear))
            progress(done, len(windows))
    return sums


def _sums(query: Tensor, keys: Tensor, values: Tensor) -> Sums:
    def of(states: Tensor) -> tuple[Tensor, Tensor]:
        """`[batch, heads, n, dim]`: `[heads, dim]` and `[heads, dim, dim]`."""
        chosen = states.transpose(0, 1).flatten(1, 2).double()  # [heads, tokens, dim]
        return chosen.sum(1).cpu(), (chosen.mT @ chosen).cpu()

    (key_sum, key_squares), (value_sum, value_squares) = of(keys), of(values)
    query_squares = of(query)[1].unflatten(0, (keys.shape[1], -1)).mean(1)
    count = torch.tensor([keys.shape[0] * keys.shape[2]], dtype=torch.float64)
    return Sums(count, key_sum, value_sum, key_squares, value_squares, query_squares)


def solve(sums: Sums) -> tuple[LayerBasis, dict[str, list[float]]]:
    """The basis of a layer, and what its directions are worth on the text that it was fitted to.

    Raises:
        ValueError: fewer tokens than a head has channels.
    """
    count, dim = float(sums.count), sums.keys.shape[-1]
    if count < 4 * dim:
        raise ValueError(f"{count:.0f} tokens are too few to fit {dim} directions to: at least {4 * dim}.")
    queries = sums.query_squares / count
    size = queries.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    root, back = _roots(queries + _RIDGE * size * torch.eye(dim, dtype=torch.float64))
    key_mean, keys = _covariance(sums.keys, sums.key_squares, count)
    value_mean, values = _covariance(sums.values, sums.value_squares, count)
    key_sizes, directions = _best(root @ keys @ root)
    value_sizes, value_directions = _best(values)
    basis = LayerBasis(
        _axes(key_mean, root @ directions, back @ directions), _axes(value_mean, value_directions, value_directions)
    )
    return basis, {"keys": _shares(key_sizes), "values": _shares(value_sizes)}


def _axes(mean: Tensor, down: Tensor, up: Tensor) -> Axes:
    return Axes(mean.float(), down.float().contiguous(), up.float().contiguous())


def _covariance(total: Tensor, squares: Tensor, count: float) -> tuple[Tensor, Tensor]:
    mean = total / count
    return mean, squares / count - mean[:, :, None] * mean[:, None, :]


def _roots(squares: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a positive matrix, and the inverse of that."""
    sizes, directions = torch.linalg.eigh(squares)
    root = sizes.clamp_min(torch.finfo(torch.float64).tiny).sqrt()[:, None, :]
    return (directions * root) @ directions.mT, (directions / root) @ directions.mT


def _best(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[heads, dim]` and eigenvectors in columns, the largest first."""
    sizes, directions = torch.linalg.eigh(squares)
    return sizes.flip(-1).clamp_min(0.0), directions.flip(-1)


def _shares(sizes: Tensor) -> list[float]:
    """Of the first quarter, half and three quarters, the mean of the KV heads."""
    shares = sizes.cumsum(-1) / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    dim = sizes.shape[-1]
    return [round(float(shares.mean(0)[rank - 1]), 4) for rank in (dim // 4, dim // 2, 3 * dim // 4)]

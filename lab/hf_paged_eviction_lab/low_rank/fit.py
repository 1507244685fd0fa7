"""Fit a basis: windows of text stream through the model, sums of products are kept, eigenvectors are found.

Of a token nothing is kept. What a direction is worth is for values its share of their variance. For keys it is the
share of the variance of the products with queries, because that is what attention reads: with C the mean of q q^T and K
the covariance of the keys, the directions are eigenvectors of C^(1/2) K C^(1/2).

Keys are taken as they are cached, after rotation, so that reading needs no positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction import __version__
from hf_paged_eviction.internals import (
    PAGED_EVICTION,
    HookedCache,
    Progress,
    Queries,
    QueryHook,
    Rotary,
    Window,
    feed,
    is_latent_attention,
    known_rotaries,
    model_fingerprint,
    paged_layers,
    shows_queries,
)

from .basis import Basis
from .codec import Axes, LayerBasis

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
        plain_squares: as `key_squares`, and `plain` as `keys`, before rotation; zero where that is not known.
    """

    count: Tensor
    keys: Tensor
    values: Tensor
    key_squares: Tensor
    value_squares: Tensor
    query_squares: Tensor
    plain: Tensor
    plain_squares: Tensor

    def plus(self, other: "Sums") -> "Sums":
        """Both."""
        return Sums(*(mine + added for mine, added in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Worth:
    """What the first directions hold, in a layer; each `[dim]`, means over KV heads, rising to 1.

    Attributes:
        keys: share of the variance of products with queries.
        rotated, plain: share of the keys' own variance in their own best directions, after and before rotation.
        values: share of their variance.
    """

    keys: Tensor
    rotated: Tensor
    plain: Tensor
    values: Tensor


class _Adder(QueryHook):
    """Adds up what a layer shows in one forward."""

    def __init__(self, layer_idx: int, real: Tensor, rotary: Rotary | None, sums: dict[int, Sums]) -> None:
        super().__init__(layer_idx)
        self._real, self._rotary, self._sums = real, rotary, sums
        self.layer: Any = None

    def attended(self, queries: Queries) -> None:
        """See `QueryHook.attended`."""
        keys, values, real = self.layer.keys, self.layer.values, self._real
        heads = keys.shape[1]
        groups = queries.query.unflatten(1, (heads, -1)).transpose(1, 2).flatten(0, 1)  # [B * G, H, n, D]
        repeated = real.repeat_interleave(len(groups) // len(real), 0)
        positions = (real.long().cumsum(-1) - 1).clamp_min(0)[:, None]
        plain = torch.zeros_like(keys) if self._rotary is None else self._rotary.unrotate(keys, positions)
        key_sum, key_squares = _sums(keys, real)
        value_sum, value_squares = _sums(values, real)
        plain_sum, plain_squares = _sums(plain, real)
        query_squares = _sums(groups, repeated)[1] / (len(groups) // len(real))
        sums = Sums(
            real.sum().double()[None].cpu(),
            *(key_sum, value_sum, key_squares, value_squares, query_squares, plain_sum, plain_squares),
        )
        before = self._sums.get(self.layer_idx)
        self._sums[self.layer_idx] = sums if before is None else before.plus(sums)


def _sums(states: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Of `[batch, heads, n, dim]`: `[heads, dim]` and `[heads, dim, dim]` float64, on the CPU."""
    chosen = states.transpose(0, 1)[:, real].double()  # [H, tokens, D]
    return chosen.sum(1).cpu(), (chosen.mT @ chosen).cpu()


def add_windows(
    model: Any,
    windows: Sequence[Window],
    sums: dict[int, Sums],
    progress: Progress = lambda tokens: None,
) -> None:
    """Let the model read windows of text, and add what it shows to the sums, by layer.

    The model is left as it was found. Its attention implementation is "paged_eviction" meanwhile.

    Args:
        model: a decoder, in evaluation mode.
        progress: called after each window with its tokens.

    Raises:
        ValueError: a model that caches latents (MLA), or has no layer that evicts.
    """
    if is_latent_attention(model.config):
        raise ValueError("This model caches latents instead of keys and values (MLA), which are of low rank already.")
    paged = paged_layers(model.config)
    if not paged:
        raise ValueError("No layer of this model can evict: there is nothing to fit.")
    rotaries = known_rotaries(model.config, paged)  # asked for by the report only
    before = model.config.get_text_config(decoder=True)._attn_implementation
    if not shows_queries(model):
        model.set_attn_implementation(PAGED_EVICTION)
    try:
        for window in windows:
            _read(model, window, paged, rotaries, sums)
            progress(window.count)
    finally:
        if before != PAGED_EVICTION:
            model.set_attn_implementation(before)


def _read(
    model: Any, window: Window, paged: Sequence[int], rotaries: Mapping[int, Rotary | None], sums: dict[int, Sums]
) -> None:
    real = (torch.ones_like(window.tokens) if window.mask is None else window.mask).bool()
    adders = {index: _Adder(index, real, rotaries.get(index), sums) for index in paged}
    cache = HookedCache(model.config, adders)
    for index, adder in adders.items():
        adder.layer = cache.layers[index]
    with torch.inference_mode():
        feed(model, window.tokens, window.mask, cache)


def solve(sums: Mapping[int, Sums], model: Any) -> tuple[Basis, dict[int, Worth]]:
    """The basis, and what its directions are worth on the text that it was fitted to.

    Raises:
        ValueError: fewer tokens than a head has channels.
    """
    layers, worth = {}, {}
    for index, of in sorted(sums.items()):
        count, dim = float(of.count), of.keys.shape[-1]
        if count < 4 * dim:
            raise ValueError(f"{count:.0f} tokens are too few to fit {dim} directions to: at least {4 * dim}.")
        queries = of.query_squares / count
        queries = queries + _RIDGE * _mean_of_diagonal(queries) * torch.eye(dim, dtype=torch.float64)
        key_mean, keys = _covariance(of.keys, of.key_squares, count)
        value_mean, values = _covariance(of.values, of.value_squares, count)
        root, back = _roots(queries)
        key_sizes, directions = _best(root @ keys @ root)
        value_sizes, value_directions = _best(values)
        layers[index] = LayerBasis(
            _axes(key_mean, root @ directions, back @ directions),
            _axes(value_mean, value_directions, value_directions),
        )
        plain = _best(_covariance(of.plain, of.plain_squares, count)[1])[0]
        worth[index] = Worth(*map(_rising, (key_sizes, _best(keys)[0], plain, value_sizes)))
    tokens = str(int(next(iter(sums.values())).count))
    return Basis(layers, model_fingerprint(model), {"tokens": tokens, "version": __version__}), worth


def _axes(mean: Tensor, down: Tensor, up: Tensor) -> Axes:
    return Axes(mean.float(), down.float().contiguous(), up.float().contiguous())


def _covariance(total: Tensor, squares: Tensor, count: float) -> tuple[Tensor, Tensor]:
    mean = total / count
    return mean, squares / count - mean[:, :, None] * mean[:, None, :]


def _mean_of_diagonal(squares: Tensor) -> Tensor:
    return squares.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]


def _roots(squares: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a positive matrix, and the inverse of that."""
    sizes, directions = torch.linalg.eigh(squares)
    root = sizes.clamp_min(torch.finfo(torch.float64).tiny).sqrt()[:, None, :]
    return (directions * root) @ directions.mT, (directions / root) @ directions.mT


def _best(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[heads, dim]` and eigenvectors in columns, the largest first."""
    sizes, directions = torch.linalg.eigh(squares)
    return sizes.flip(-1).clamp_min(0.0), directions.flip(-1)


def _rising(sizes: Tensor) -> Tensor:
    shares = sizes.cumsum(-1) / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return shares.mean(0)

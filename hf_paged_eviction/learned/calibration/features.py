"""The features of a token: numbers that cost about as much as a norm.

The score is linear in their weights, so the fit has a closed form. The unit key is a feature, as in Q-Filters (arXiv
2503.02812): keys that attract attention share a direction, which a norm does not show.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Raised whenever the features change: weights of one version mean nothing in another.
VERSION = 1

#: Below this a norm counts as this.
_SMALLEST = 1e-6

#: Position classes, as "position below"; the first one is the token that attention likes to rest on.
_CLASSES = (1, 4, 64)

#: The features that are one number; `head_dim` components of the unit key follow them.
SCALARS = (
    "log key norm",
    "log value norm",
    "cosine to mean key",
    "log value deviation",
    *(f"position < {below}" for below in _CLASSES),
)


@dataclass(frozen=True)
class Means:
    """Means that the features of a layer refer to. They are constants, so a score depends on its own token only.

    Attributes:
        key: `[kv_heads, head_dim]`, direction of the mean of the unit keys, itself of length 1.
        value: `[kv_heads, value_dim]`, mean value.
    """

    key: Tensor
    value: Tensor


def unit(states: Tensor) -> Tensor:
    """`[..., dim]` scaled to length 1."""
    return states / _norm(states)[..., None]


def features(keys: Tensor, values: Tensor, positions: Tensor, means: Means) -> Tensor:
    """Compute the features of all tokens.

    Args:
        keys, values: `[batch, kv_heads, tokens, dim]`, floating point of 32 bits or more; keys as the calibration has
            them, see `Calibration.unrotated`.
        positions: `[batch, kv_heads, tokens]`.

    Returns:
        `[batch, kv_heads, tokens, len(SCALARS) + head_dim]`.
    """
    direction = unit(keys)
    cosine = direction @ means.key[:, :, None].to(keys.dtype)
    return torch.cat([*_norms(keys, values), cosine, *_rest(values, positions, means), direction], dim=-1)


@dataclass(frozen=True)
class Folded:
    """Weights in a form that is fast to apply.

    Attributes:
        direction: `[kv_heads, head_dim]`, for the unit key.
        norms: `[kv_heads, 1]` each, for the logs of key norm, value norm and value deviation.
        mean_value: `[kv_heads, 1, value_dim]`.
        classes: `[kv_heads, classes + 1]`, what the position class adds, the offset included.
    """

    direction: Tensor
    norms: tuple[Tensor, Tensor, Tensor]
    mean_value: Tensor
    classes: Tensor

    @classmethod
    def of(cls, means: Means, weights: Tensor, offset: Tensor) -> "Folded":
        """Fold weights `[kv_heads, len(SCALARS) + head_dim]` and offsets `[kv_heads]`."""
        weight = {name: weights[:, index, None] for index, name in enumerate(SCALARS)}
        # A position below one bound is below all later ones.
        early = weights[:, len(SCALARS) - len(_CLASSES) : len(SCALARS)].flip(1).cumsum(1).flip(1)
        return cls(
            weights[:, len(SCALARS) :] + weight["cosine to mean key"] * means.key,
            (weight["log key norm"], weight["log value norm"], weight["log value deviation"]),
            means.value[:, None],
            torch.cat([early, torch.zeros_like(early[:, :1])], dim=1) + offset[:, None],
        )

    def __call__(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """The product of features and weights, `[batch, kv_heads, tokens]`, without storing the features."""
        size = _norm(keys)
        key, value, away = self.norms
        total = torch.einsum("bhtd,hd->bht", keys, self.direction.to(keys.dtype)) / size + size.log() * key
        total = total + _norm(values).log() * value + _norm(values - self.mean_value.to(values.dtype)).log() * away
        which = torch.stack([positions >= below for below in _CLASSES]).sum(0)
        return total + self.classes.expand(len(keys), -1, -1).gather(-1, which)


def _norms(keys: Tensor, values: Tensor) -> list[Tensor]:
    return [_norm(keys).log()[..., None], _norm(values).log()[..., None]]


def _rest(values: Tensor, positions: Tensor, means: Means) -> list[Tensor]:
    deviation = _norm(values - means.value[:, None].to(values.dtype)).log()[..., None]
    return [deviation, *((positions < below).to(values.dtype)[..., None] for below in _CLASSES)]


def _norm(states: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(states, dim=-1).clamp_min(_SMALLEST)
    return norm

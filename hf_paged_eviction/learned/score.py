"""The score of one layer: a linear function of a token's features, then a rising curve.

The features are numbers that cost about as much as a norm. The score is linear in their weights, so the fit has a
closed form. The unit key is a feature, as in Q-Filters (arXiv 2503.02812): keys that attract attention share a
direction, which a norm does not show.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

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


def unit(states: Tensor) -> Tensor:
    """`[..., dim]` scaled to length 1."""
    return states / _norm(states)[..., None]


def _norm(states: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(states, dim=-1).clamp_min(_SMALLEST)
    return norm


def features(keys: Tensor, values: Tensor, positions: Tensor, mean_key: Tensor, mean_value: Tensor) -> Tensor:
    """Compute the features of all tokens.

    Args:
        keys, values: `[batch, kv_heads, tokens, dim]`, floating point of 32 bits or more; keys as the calibration has
            them, see `Calibration.unrotated`.
        positions: `[batch, kv_heads, tokens]`.
        mean_key, mean_value: see `LayerScore`.

    Returns:
        `[batch, kv_heads, tokens, len(SCALARS) + head_dim]`.
    """
    direction = unit(keys)
    numbers = [
        _norm(keys).log(),
        _norm(values).log(),
        (direction @ mean_key[:, :, None].to(keys.dtype))[..., 0],
        _norm(values - mean_value[:, None].to(values.dtype)).log(),
        *((positions < below).to(values.dtype) for below in _CLASSES),
    ]
    return torch.cat([torch.stack(numbers, dim=-1), direction], dim=-1)


@dataclass(frozen=True)
class LayerScore:
    """The score of one layer.

    The unit is attention: roughly the largest share of a query's attention that the token will get from a distance. So
    scores of different heads can be compared and averaged.

    Attributes:
        mean_key: `[kv_heads, head_dim]`, direction of the mean of the unit keys, itself of length 1. The means are
            constants, so a score depends on its own token only.
        mean_value: `[kv_heads, value_dim]`.
        weights: `[kv_heads, features]`, first those of `SCALARS`, then of the unit key.
        offset: `[kv_heads]`.
        x, y: `[kv_heads, knots]`, the knots of the curve.
    """

    mean_key: Tensor
    mean_value: Tensor
    weights: Tensor
    offset: Tensor
    x: Tensor
    y: Tensor

    @property
    def kv_heads(self) -> int:
        return self.weights.shape[0]

    @property
    def key_dim(self) -> int:
        return self.mean_key.shape[1]

    @property
    def value_dim(self) -> int:
        return self.mean_value.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "LayerScore":
        """Make a score from `tensors`.

        Raises:
            ValueError: a number is not finite. KeyError: a tensor is missing.
        """
        score = cls(*(tensors[field.name] for field in fields(cls)))
        if not all(tensor.isfinite().all() for tensor in score.tensors().values()):
            raise ValueError("its scores are not finite")
        return score

    def line(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """The linear part of the score, without storing the features; arguments as in `__call__`."""
        wide = torch.promote_types(keys.dtype, torch.float32)
        keys, values = keys.to(wide), values.to(wide)
        direction, classes, mean_value, key, value, away = self._folded
        size = _norm(keys)
        total = torch.einsum("bhtd,hd->bht", keys, direction.to(wide)) / size + size.log() * key
        total = total + _norm(values).log() * value + _norm(values - mean_value.to(wide)).log() * away
        which = torch.stack([positions >= below for below in _CLASSES]).sum(0)
        return total + classes.expand(len(keys), -1, -1).gather(-1, which)

    @cached_property
    def _folded(self) -> tuple[Tensor, ...]:
        """The weights in a form that is fast to apply: for the unit key, `[kv_heads, head_dim]`; what each position
        class adds with the offset, `[kv_heads, classes + 1]`; `mean_value`; for the logs, `[kv_heads, 1]` each."""
        with torch.inference_mode(False):  # ordinary tensors, even if they are first needed under `inference_mode`
            key, value, cosine, away = self.weights[:, : len(SCALARS) - len(_CLASSES), None].unbind(1)
            # A position below one bound is below all later ones.
            early = self.weights[:, len(SCALARS) - len(_CLASSES) : len(SCALARS)].flip(1).cumsum(1).flip(1)
            classes = torch.cat([early, torch.zeros_like(early[:, :1])], dim=1) + self.offset[:, None]
            direction = self.weights[:, len(SCALARS) :] + cosine * self.mean_key
            return direction, classes, self.mean_value[:, None], key, value, away

    def __call__(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Score keys and values `[batch, kv_heads, tokens, dim]`: `[batch, kv_heads, tokens]` float32."""
        return bend(self.line(keys, values, positions).float(), self.x, self.y)

    def to(self, device: torch.device, heads: slice = slice(None)) -> "LayerScore":
        """The score of some of the heads, in float32 on a device."""
        with torch.inference_mode(False):
            return LayerScore(*(tensor[heads].to(device, torch.float32) for tensor in self.tensors().values()))


def bend(scores: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Apply one curve per set: linear between the knots, and extrapolated beyond the ends.

    Args:
        scores: `[batch, sets, n]`.
        x, y: `[sets, knots]`.
    """
    wanted = scores.transpose(0, 1).flatten(1).contiguous()
    # The first segment that ends above the score. Knots at the same place have no segment between them.
    upper = torch.searchsorted(x, wanted).clamp(1, x.shape[1] - 1)
    left, right = x.gather(1, upper - 1), x.gather(1, upper)
    low, high = y.gather(1, upper - 1), y.gather(1, upper)
    width = right - left
    slope = torch.where(width > 0, (high - low) / width.clamp_min(1e-30), 0.0)
    bent: Tensor = (low + slope * (wanted - left)).unflatten(1, (scores.shape[0], -1))
    return bent.transpose(0, 1)

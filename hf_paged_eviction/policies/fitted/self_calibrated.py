"""The calibrated score without a file: fitted to the prompt."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention.weights import Attention
from ...learned.calibration.features import unit
from ...learned.moments import exact, shrunk_line
from ..base import EvictionPolicy, ScoreContext, Statistics
from ..checks import check_count, check_positive
from ..needs import Needs
from ..norms import l2_norm
from ..registry import register_policy

#: Position classes, as "position below".
_CLASSES = (1, 4, 64)
#: Features that are one number: the norm, and those classes. The components of the unit key follow.
_SCALARS = 1 + len(_CLASSES)
#: What the weights of these cost, and that of the cosine to the mean key.
_LIGHT = 1e-3


@register_policy("self_calibrated")
@dataclass(frozen=True)
class SelfCalibrated(EvictionPolicy):
    r"""The attention to be expected for a key, learned from the prompt, with no attention from then on.

    .. math:: s_t = w \cdot f(k_t, p_t) + b, \quad w, b \text{ per row, layer and KV head}

    While the prompt is read, each token's largest weight is noted, as paid by queries at least `distance` tokens later
    (of a group of query heads the mean). When the prompt has been seen, a line through cheap features of the keys (log
    of the norm, cosine to their mean, direction, position class) is fitted to it, in closed form, for each row, layer
    and KV head. This line is the score: for the tokens of the prompt too, because what the prompt itself happened to
    look at says little of what will be asked. Decoding adds no attention to the fit. Values take no part: observers are
    not shown them.

    A forward of several tokens fits anew, to the tokens it saw, those held included, as soon as `least_tokens` have
    come since the last fit, decoded ones included, and as long as fewer have come at all, so that a budget that
    overflows early is served by what is known; in a chunked prefill what small chunks pay adds up until then. Single
    tokens are not observed at all. While no token has been `distance` away from a query all scores are 0, so that the
    oldest tokens go first, as by `recency`. Memory per row and layer, in numbers:
    kv_heads x (head_dim + 5), and one per held token. A prompt costs its attention once more, in pieces, and one pass
    for each piece over the keys.

    Args:
        distance: tokens nearer than this to a query do not count, because they are in the cache anyway.
        least_tokens: so many come between two fits.
        shrinkage: what the components of the direction cost. The more, the less they may add to the other features.

    Raises:
        ValueError: a parameter is out of range.
    """

    distance: int = 64
    least_tokens: int = 128
    shrinkage: float = 10.0

    needs = Needs(
        absolute_noise=True,
        common_unit=True,
        supports_mla=False,
        token_statistics=("largest",),
        row_statistics=("weights", "offset", "fitted"),
        observes_decode=False,
    )

    def __post_init__(self) -> None:
        check_count("distance", self.distance)
        check_count("least_tokens", self.least_tokens, at_least=2)
        check_positive("shrinkage", self.shrinkage)

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        positions = attention.key_positions
        newest = positions.amax((1, 2)).float()  # [B]
        fitted = statistics.get("fitted", torch.full_like(newest, -1.0))
        # All pieces of a forward are shown the same keys: the first one brings new ones, and the others fit as well.
        learns = (newest - fitted >= self.least_tokens) | (newest < self.least_tokens) | (fitted == newest)
        away = attention.query_positions[:, None, :, None] - positions[:, :, None, :] >= self.distance
        paid = (attention.weights.mean(2) * away).amax(2)
        largest = torch.maximum(statistics["largest"], paid)
        weights, offset = self._fit(attention.keys, positions, largest, newest)
        chosen = learns[:, None]
        old_weights = statistics.get("weights", torch.zeros_like(weights))
        old_offset = statistics.get("offset", torch.zeros_like(offset))
        return {
            "largest": largest,
            "weights": torch.where(chosen[..., None], weights, old_weights),
            "offset": torch.where(chosen, offset, old_offset),
            "fitted": torch.where(learns, newest, fitted),
        }

    def _fit(self, keys: Tensor, positions: Tensor, target: Tensor, newest: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, H, features]` and `[B, H]`, of the tokens that some query was far enough from."""
        rows, heads = positions.shape[:2]
        counted = ((positions >= 0) & (positions <= newest[:, None, None] - self.distance)).flatten(0, 1)[..., None]
        counts = counted.sum(1).clamp_min(1)
        samples = _features(keys, positions).to(exact(keys.device)).flatten(0, 1)
        samples = torch.where(counted, samples, 0.0)  # a pad's key may be anything
        mean_key = unit(samples[..., _SCALARS:].sum(1))[..., None]
        target = torch.where(counted, target.flatten(0, 1)[..., None], 0.0)
        joined = torch.cat([samples[..., _SCALARS:] @ mean_key, samples, target.to(samples)], dim=-1)
        mean = joined.sum(1) / counts
        around = torch.where(counted, joined - mean[:, None], 0.0)
        covariance = around.mT @ around / counts[..., None]
        size = samples.shape[-1] - _SCALARS
        light = torch.full((1 + _SCALARS,), _LIGHT, device=keys.device)
        penalty = torch.cat([light, torch.full((size,), float(self.shrinkage), device=keys.device)])
        line = shrunk_line(mean, covariance, penalty)
        # The cosine to the mean key is a direction, too.
        direction = line.weights[:, 1 + _SCALARS :] + line.weights[:, :1] * mean_key[..., 0]
        weights = torch.cat([line.weights[:, 1 : 1 + _SCALARS], direction], dim=-1)
        return weights.float().unflatten(0, (rows, heads)), line.offset.float().unflatten(0, (rows, heads))

    def score(self, context: ScoreContext) -> Tensor:
        known = context.statistics
        if "weights" not in known:
            return torch.zeros(context.positions.shape, device=context.positions.device)
        weights, offset = known["weights"], known["offset"]
        found = (_features(context.keys, context.positions) @ weights[..., None].to(_wide(context.keys)))[..., 0]
        return (found + offset[..., None]).float()


def _features(keys: Tensor, positions: Tensor) -> Tensor:
    """`[batch, kv_heads, tokens, 4 + head_dim]`."""
    keys = keys.to(_wide(keys))
    scalars = [l2_norm(keys).clamp_min(1e-6).log(), *(positions < below for below in _CLASSES)]
    return torch.cat([torch.stack([each.to(keys.dtype) for each in scalars], dim=-1), unit(keys)], dim=-1)


def _wide(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)

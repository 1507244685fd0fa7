"""The calibrated score without a file: fitted to the prompt."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention.weights import Attention
from ...learned.moments import exact, shrunk_line
from ...learned.score import unit
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
    r"""Estimates the attention that a key will receive, by a linear fit to the prompt itself.

    .. math:: s_t = w \cdot f(k_t, p_t) + b, \quad w, b \text{ per row, layer and KV head}

    `f` are cheap features of the key: log norm, cosine to the mean key, direction and position class. For each token of
    the prompt the policy records the largest attention weight that a query at least `distance` tokens later pays it
    (averaged over the query heads that share a KV head). `w` and `b` are the ridge regression of that weight on the
    features, in closed form, per row, layer and KV head. The fit also scores the tokens of the prompt, because what the
    prompt happens to attend to says little about later questions. Values are not used. From no paper.

    The fit is updated by forwards of several tokens only: by each of them until the row has `least_tokens` tokens, and
    later whenever `least_tokens` tokens (decoded ones included) have come since the last fit. Until a token is
    `distance` away from a query, all scores are 0 and the oldest tokens go first. A prompt costs its attention a second
    time, in pieces. Memory per row and layer: KV heads x (head size + 5) numbers, and one number per held token.

    Args:
        distance: queries nearer to a token than this do not count, because the token is in the cache anyway.
        least_tokens: number of tokens between two fits.
        shrinkage: ridge penalty of the components of the direction; larger = the direction counts less.

    Raises:
        ValueError: a parameter is out of range.
    """

    distance: int = 64
    least_tokens: int = 128
    shrinkage: float = 10.0

    needs = Needs(
        absolute_noise=True,
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
        samples = torch.where(counted, samples, 0.0)  # the key of a pad may be anything
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
        # The cosine to the mean key also depends on the direction alone.
        direction = line.weights[:, 1 + _SCALARS :] + line.weights[:, :1] * mean_key[..., 0]
        weights = torch.cat([line.weights[:, 1 : 1 + _SCALARS], direction], dim=-1)
        return weights.float().unflatten(0, (rows, heads)), line.offset.float().unflatten(0, (rows, heads))

    def score(self, context: ScoreContext) -> Tensor:
        statistics = context.statistics
        if "weights" not in statistics:
            return torch.zeros(context.positions.shape, device=context.positions.device)
        weights, offset = statistics["weights"], statistics["offset"]
        products = (_features(context.keys, context.positions) @ weights[..., None].to(_wide(context.keys)))[..., 0]
        return (products + offset[..., None]).float()


def _features(keys: Tensor, positions: Tensor) -> Tensor:
    """`[batch, kv_heads, tokens, 4 + head_dim]`."""
    keys = keys.to(_wide(keys))
    scalars = [l2_norm(keys).clamp_min(1e-6).log(), *(positions < below for below in _CLASSES)]
    return torch.cat([torch.stack([scalar.to(keys.dtype) for scalar in scalars], dim=-1), unit(keys)], dim=-1)


def _wide(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)

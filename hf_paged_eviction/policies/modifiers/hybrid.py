"""Several policies at once."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..base import EvictionPolicy, ScoreContext
from ..modifier import Modifier
from ..needs import Needs
from ..normalise import standardise
from ..registry import register_policy


@dataclass(frozen=True)
class _Weighted(Modifier):
    """The parameters of a `Hybrid`, as they are kept."""

    policies: tuple[EvictionPolicy, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        if len(self.policies) < 2:
            raise ValueError(f"hybrid joins two or more policies, as in {self.example!r}; got {len(self.policies)}.")
        if self.weights is not None:
            _check_weights(self.weights, len(self.policies))

    @property
    def parts(self) -> tuple[EvictionPolicy, ...]:
        return self.policies


@register_policy("hybrid")
class Hybrid(_Weighted):
    r"""Adds the scores of several policies, each scaled to mean 0 and mean absolute deviation 1.

    .. math:: s_t = \sum_i w_i \frac{s^i_t - \bar s^i}{\operatorname{mean}_u |s^i_u - \bar s^i|}

    `i` runs over the policies, and `w` are the weights. Means are taken per row and KV head over all valid tokens with
    finite scores, whether they can be evicted or not. A token that one policy pins is pinned. A token that one policy
    scores minus infinity goes first, unless another policy pins it.

    Args:
        policies: two or more.
        weights: one number above 0 per policy; None = all equal.

    Raises:
        ValueError: there are fewer than two policies, or `weights` does not fit.
        TypeError: an argument is not a policy.
    """

    example: ClassVar[str] = "hybrid(h2o, recency, weights=(2, 1))"

    def __init__(self, *policies: EvictionPolicy, weights: tuple[float, ...] | None = None) -> None:
        super().__init__(policies, tuple(weights) if isinstance(weights, list) else weights)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, absolute_noise=True)  # means are subtracted

    def score(self, context: ScoreContext) -> Tensor:
        weights = self.weights or (1.0,) * len(self.policies)
        scores = [standardise(score.float(), context.valid) for score in self.part_scores(context)]
        total = torch.stack([weight * score for weight, score in zip(weights, scores, strict=True)]).sum(0)
        pinned = torch.stack(scores).isposinf().any(0)
        return total.masked_fill(pinned, float("inf"))


def _check_weights(weights: object, count: int) -> None:
    numbers = isinstance(weights, tuple) and all(
        isinstance(weight, (int, float)) and not isinstance(weight, bool) and math.isfinite(weight) and weight > 0
        for weight in weights
    )
    if not numbers or len(weights) != count:  # type: ignore[arg-type]
        raise ValueError(f"weights must be {count} numbers above 0, one for each policy, got {weights!r}.")

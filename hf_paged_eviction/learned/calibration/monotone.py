"""A rising curve that maps scores with the right order to the right size."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

#: Shares of the samples between which a knot lies: dense where eviction decides, among the highest scores.
_EDGES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.8125, 0.875, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)

#: The least slope anywhere, as a share of the mean slope: different scores stay different.
_LEAST_SLOPE = 1e-2


def fit_curve(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Knots of the isotonic regression of `target` on `scores`, over groups of similar scores.

    Args:
        scores, target: `[samples]`.

    Returns:
        `x` and `y`, both `[knots]` float64, strictly rising unless all scores are equal.
    """
    scores, order = scores.double().sort()
    target = target.double()[order]
    bounds = [round(edge * len(scores)) for edge in _EDGES]
    groups = [slice(low, high) for low, high in pairwise(bounds) if high > low]
    x = torch.stack([scores[group].mean() for group in groups])
    y = _rising([float(target[group].mean()) for group in groups], [group.stop - group.start for group in groups])
    return _with_slope(x, torch.tensor(y, dtype=torch.float64, device="cpu"), len(_EDGES) - 1)


def _rising(values: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """The closest sequence that never falls: neighbours that fall are joined into their mean."""
    pools: list[tuple[float, int, int]] = []  # mean, samples, values
    for value, size in zip(values, sizes, strict=True):
        pools.append((value, size, 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (low, few, a), (high, more, b) = pools[-2:]
            pools[-2:] = [((low * few + high * more) / (few + more), few + more, a + b)]
    return [mean for mean, _, count in pools for _ in range(count)]


def _with_slope(x: Tensor, y: Tensor, knots: int) -> tuple[Tensor, Tensor]:
    span = x[-1] - x[0]
    slope = (y[-1] - y[0]) / span if span > 0 else torch.zeros_like(span)
    y = y + _LEAST_SLOPE * slope.clamp_min(1e-9) * (x - x[0])
    # With fewer samples than groups there are fewer knots; more of the last change nothing.
    missing = knots - len(x)
    return torch.cat([x, x[-1:].expand(missing)]), torch.cat([y, y[-1:].expand(missing)])


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

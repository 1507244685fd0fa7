"""Least squares from running sums, without storing samples."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Line:
    """One linear function per set.

    Attributes:
        weights: `[sets, features]`.
        offset: `[sets]`.
    """

    weights: Tensor
    offset: Tensor

    def __call__(self, samples: Tensor) -> Tensor:
        """`[sets, n, features]` -> `[sets, n]`."""
        return (samples @ self.weights[:, :, None])[..., 0] + self.offset[:, None]


def least_squares(portions: Iterable[tuple[Tensor, Tensor]], penalty: Tensor) -> Line:
    """The line of least squares, with a penalty, for several independent sets (KV heads) at once.

    The sums are taken around the mean of the first samples, which keeps rounding errors small, in float64 if the device
    has it. The result depends on the portions of the samples only in its last bits.

    Args:
        portions: samples `[sets, n, features]` and targets `[sets, n]`, read one after the other.
        penalty: `[features]`, not negative; cost of the square of a weight, per sample and for a feature of standard
            deviation 1. All zero = plain least squares.

    Raises:
        ValueError: there were no samples.
    """
    count, origin, total, products = 0, *[torch.empty(0, device="cpu")] * 3
    for samples, target in portions:
        if not samples.shape[1]:
            continue
        joined = torch.cat([samples, target[..., None]], dim=-1).to(exact(samples.device))
        if not count:
            origin = joined.mean(1)
            total, products = torch.zeros_like(origin), origin.new_zeros(*origin.shape, origin.shape[-1])
        joined = joined - origin[:, None]
        count += joined.shape[1]
        total += joined.sum(1)
        products += joined.mT @ joined
    if not count:
        raise ValueError("There is nothing to fit: no samples were given.")
    mean = total / count
    return shrunk_line(mean + origin, products / count - mean[:, :, None] * mean[:, None, :], penalty)


def shrunk_line(mean: Tensor, covariance: Tensor, penalty: Tensor) -> Line:
    """Ridge regression of the last variable on the others. It reads no value on the host.

    Args:
        mean: `[sets, features + 1]`.
        covariance: `[sets, features + 1, features + 1]`.
        penalty: `[features]`, see `least_squares`.
    """
    deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()[:, :-1]
    # A feature that is always the same explains nothing, and must not be blown up to deviation 1.
    varies = deviation > 1e-9 * mean[:, :-1].abs().clamp_min(1)
    scale = torch.where(varies, 1 / deviation.clamp_min(1e-30), 0.0)
    matrix = covariance[:, :-1, :-1] * scale[:, :, None] * scale[:, None, :]
    diagonal = penalty.to(matrix) + torch.where(varies, 0.0, 1.0)
    matrix = matrix + torch.diag_embed(diagonal.expand_as(scale))
    wanted = (covariance[:, :-1, -1] * scale)[..., None]
    weights = torch.linalg.solve_ex(matrix, wanted, check_errors=False).result[..., 0] * scale
    return Line(weights, mean[:, -1] - (weights * mean[:, :-1]).sum(-1))


def exact(device: torch.device) -> torch.dtype:
    """The widest floating point of a device."""
    return torch.float32 if device.type == "mps" else torch.float64

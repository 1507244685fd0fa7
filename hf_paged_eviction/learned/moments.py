"""Least squares from running sums, without storing samples."""

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


class Moments:
    """Sums of products of features and target, for several independent sets (KV heads) at once.

    The sums are taken around the mean of the first samples, which keeps rounding errors small, in float64 if the device
    has it. The result depends on the portions of the samples only in its last bits.
    """

    def __init__(self) -> None:
        self.count = 0
        self._origin: Tensor | None = None  # [sets, features + 1]
        self._sum: Tensor | None = None  # [sets, features + 1]
        self._products: Tensor | None = None  # [sets, features + 1, features + 1]

    def add(self, samples: Tensor, target: Tensor) -> None:
        """Add samples.

        Args:
            samples: `[sets, n, features]`.
            target: `[sets, n]`.
        """
        if not samples.shape[1]:
            return
        joined = torch.cat([samples, target[..., None]], dim=-1).to(exact(samples.device))
        if self._origin is None or self._sum is None or self._products is None:
            self._origin = joined.mean(1)
            self._sum = torch.zeros_like(self._origin)
            self._products = self._sum.new_zeros(*self._sum.shape, self._sum.shape[-1])
        joined = joined - self._origin[:, None]
        self.count += joined.shape[1]
        self._sum += joined.sum(1)
        self._products += joined.mT @ joined

    def solve(self, penalty: Tensor) -> Line:
        """Solve for the line of least squares, with a penalty.

        Args:
            penalty: `[features]`, not negative; cost of the square of a weight, per sample and for a feature of
                standard deviation 1. All zero = plain least squares.

        Raises:
            ValueError: there were no samples.
        """
        if self._origin is None or self._sum is None or self._products is None:
            raise ValueError("There is nothing to fit: no samples were added.")
        mean = self._sum / self.count
        covariance = self._products / self.count - mean[:, :, None] * mean[:, None, :]
        return shrunk_line(mean + self._origin, covariance, penalty)


def shrunk_line(mean: Tensor, covariance: Tensor, penalty: Tensor) -> Line:
    """Ridge regression of the last variable on the others. It reads no value on the host.

    Args:
        mean: `[sets, features + 1]`.
        covariance: `[sets, features + 1, features + 1]`.
        penalty: `[features]`, see `Moments.solve`.
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

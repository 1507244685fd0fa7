"""Correlation coefficients."""

import torch
from torch import Tensor


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Correlation along the last dimension; 0 if one of the two is constant."""
    a, b = (vector.double() - vector.double().mean(-1, keepdim=True) for vector in (a, b))
    norms = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(norms > 0, (a * b).sum(-1) / norms.clamp_min(1e-300), 0.0)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Correlation of ranks along the last dimension; equal values share the mean of their ranks."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(values: Tensor) -> Tensor:
    ordered = values.sort(dim=-1).values
    low = torch.searchsorted(ordered, values.contiguous())
    high = torch.searchsorted(ordered, values.contiguous(), right=True)
    return (low + high).double() / 2

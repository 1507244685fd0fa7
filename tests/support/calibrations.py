"""Calibrations that have nothing to do with any model."""

import torch

from hf_paged_eviction.learned.score import SCALARS, LayerScore, unit


def drawn_score(heads: int, dim: int, draw: torch.Generator) -> LayerScore:
    """What a layer's tokens are worth, by weights that are drawn."""
    mean_key, mean_value = unit(torch.randn(heads, dim, generator=draw)), torch.randn(heads, dim, generator=draw)
    weights = torch.randn(heads, len(SCALARS) + dim, generator=draw)
    x, y = torch.rand(2, heads, 16, generator=draw).cumsum(-1)
    return LayerScore(mean_key, mean_value, weights, torch.zeros(heads), x - 4, y)

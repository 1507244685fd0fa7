"""A slow cache of low rank: everything is kept as it came, and projected, number by number, when it is read."""

from __future__ import annotations

from typing import Any

import torch
from rounded_recorder import RoundedRecorder
from torch import Tensor

from hf_paged_eviction_lab.low_rank.basis import Axes, Basis
from rounded import slow_round


def slow_project(state: list[float], axes: Axes, head: int, rank: int, bits: int | None) -> list[float]:
    """One state `[dim]` of one head as it is read after only `rank` coefficients of it were kept."""
    mean, down, up = (tensor[head].double().tolist() for tensor in (axes.mean, axes.down, axes.up))
    dim = len(state)
    coordinates = [sum((state[at] - mean[at]) * down[at][direction] for at in range(dim)) for direction in range(rank)]
    coordinates = slow_round(torch.tensor(coordinates, dtype=torch.float64), bits, True).tolist()
    return [
        mean[at] + sum(coordinates[direction] * up[at][direction] for direction in range(rank)) for at in range(dim)
    ]


def slow_projected(states: Tensor, axes: Axes, rank: int, bits: int | None) -> Tensor:
    """The same of `[rows, heads, tokens, dim]`."""
    projected = [
        [[slow_project(token, axes, head, rank, bits) for token in tokens] for head, tokens in enumerate(heads)]
        for heads in states.tolist()
    ]
    return torch.tensor(projected, dtype=torch.float64).to(states.dtype)


class RankRecorder(RoundedRecorder):
    """Notes which tokens each forward may see as they came; the others are projected."""

    def __init__(self, model: Any, cache: Any, basis: Basis, ranks: tuple[int | None, int | None], bits: Any) -> None:
        super().__init__(model, cache, bits, latent=False)
        self.basis, self.ranks = basis, ranks
        self.known: dict[tuple[int, str, int, int], Tensor] = {}

    def round(self, index: int, count: int | None = None) -> tuple[Tensor, Tensor]:
        layer, rounded = self.basis.layers[index], list(super().round(index, count))
        for place, (name, axes) in enumerate((("keys", layer.keys), ("values", layer.values))):
            rank, bits = self.ranks[place], self.bits[place]
            if rank is not None:
                columns = [getattr(column, name)[index] for column in self.columns[:count]]
                rounded[place] = torch.stack([self._column(states, axes, rank, bits) for states in columns], dim=2)
        return rounded[0], rounded[1]

    def _column(self, states: Tensor, axes: Axes, rank: int, bits: int | None) -> Tensor:
        key = (id(axes), str(states.tolist()), rank, bits or 0)  # the same at every look
        if key not in self.known:
            self.known[key] = slow_projected(states[:, :, None], axes, rank, bits)[:, :, 0]
        return self.known[key]

"""A slow cache of low rank: everything is kept as it came, and projected, number by number, when it is read.

Which tokens a forward sees projected follows from positions alone: all but the first four of a row, where they are
protected, the newest block before the forward, and the forward's own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction_lab.low_rank.basis import Axes, Basis
from reference import (
    Recorder,
    _masks,
    _recorded,
    assert_said,
    check_layer,
    pads_in_segments,
    replayed_forward,
)
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


class RankRecorder(Recorder):
    """Notes which tokens each forward may see as they came, the others being projected, and checks what is held."""

    def __init__(self, model: Any, cache: Any, basis: Basis, ranks: tuple[int | None, int | None], bits: Any) -> None:
        super().__init__(model, cache)
        self.basis, self.ranks, self.bits = basis, ranks, bits
        self.known: dict[tuple[int, str, int, int], Tensor] = {}

    def project(self, index: int, count: int | None = None) -> list[Tensor]:
        """What a layer was given, projected where there is a rank."""
        layer, projected = self.basis.layers[index], list(self.came(index, count))
        for place, (name, axes) in enumerate((("keys", layer.keys), ("values", layer.values))):
            rank, bits = self.ranks[place], self.bits[place]
            if rank is not None:
                columns = [getattr(column, name)[index] for column in self.columns[:count]]
                projected[place] = torch.stack([self._column(states, axes, rank, bits) for states in columns], dim=2)
        return projected

    def _column(self, states: Tensor, axes: Axes, rank: int, bits: int | None) -> Tensor:
        key = (id(axes), str(states.tolist()), rank, bits or 0)  # the same at every look
        if key not in self.known:
            self.known[key] = slow_projected(states[:, :, None], axes, rank, bits)[:, :, 0]
        return self.known[key]

    def _watch(self, index: int, layer: Any, update: Callable[..., Any]) -> Callable[..., Any]:
        followed = super()._watch(index, layer, update)

        def watched(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = followed(keys, values, *args, **kwargs)
            # A single token counts as if it were there already; several see what was there before.
            stop = len(self.columns) if keys.shape[2] == 1 else len(self.columns) - len(self.new)
            for column in self.new:
                column.newest[index] = [
                    sum(other.real[row] for other in self.columns[:stop]) - layer.budget.block_size
                    for row in range(keys.shape[0])
                ]
            return result

        return watched

    def _check_slots(self, layer: Any, index: int) -> None:
        check_layer(layer, self.columns, index, as_they_came=False)
        if not layer.held:
            return
        positions, real = layer.positions, torch.tensor([column.real for column in self.columns]).T
        ahead = real.long().cumsum(-1)[:, None].expand(-1, positions.shape[1], -1).contiguous()
        at = torch.searchsorted(ahead, positions + 1).clamp(max=len(self.columns) - 1)[..., None]
        newest = positions.amax((1, 2), keepdim=True) - layer.budget.block_size
        exact = ((positions < min(layer.budget.protected, 4)) | (positions > newest))[..., None]
        came = self.came(index)
        for held, states, few in zip((layer.keys, layer.values), came, self.project(index), strict=True):
            expected = torch.where(
                exact, *(kind.gather(2, at.expand(-1, -1, -1, kind.shape[-1])) for kind in (states, few))
            )
            different = (held[:, :, : layer.held] - expected).abs().amax(-1) > 1e-6
            assert not (different & (positions >= 0)).any()
        poison_codes(layer)

    def came(self, index: int, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the first columns as a layer was given them, `[rows, heads, columns, dim]`."""
        columns = self.columns[:count]
        return (
            torch.stack([column.keys[index] for column in columns], dim=2),
            torch.stack([column.values[index] for column in columns], dim=2),
        )


def poison_codes(layer: Any) -> None:
    """As `reference.poison_unused`, of codes."""
    pads = (layer.positions < 0)[..., None]
    for levels in layer.store.tensors[1:4:2]:
        if not levels.shape[-1]:
            continue
        if layer.store.columns.layout.lengths is not None:
            levels[pads_in_segments(layer)] = 1e3
            continue
        levels[:, :, layer.held :] = math.nan
        held = levels[:, :, : layer.held]
        held.copy_(held.masked_fill(pads, 1e3))


class _RankCache(DynamicCache):
    """Gives each forward what it may see, rounded where it must."""

    def __init__(self, recorder: RankRecorder) -> None:
        super().__init__(config=recorder.model.config)
        self.recorder = recorder
        self.protected = {index: min(layer.budget.protected, 4) for index, layer in recorder.cache.paged_layers}
        self.count = 0  # columns of this forward

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        # Eager attention knows no softmax of a pad that sees nothing; what it then says must reach nobody.
        key_states, value_states = key_states.nan_to_num(), value_states.nan_to_num()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self.protected:
            return keys, values
        columns = self.recorder.columns[: keys.shape[2]]
        newest, first_new = columns[-1].newest[layer_idx], len(columns) - self.count
        real = torch.tensor([column.real for column in columns]).T
        position = real.long().cumsum(-1) - 1
        rounded = (position >= self.protected[layer_idx]) & (position < torch.tensor(newest)[:, None])
        rounded[:, first_new:] = False
        # What the run was given: noise of the last digit may round to another level.
        came = self.recorder.came(layer_idx, len(columns))
        differences = [(own - other).abs().amax((1, 3)) for own, other in zip((keys, values), came, strict=True)]
        assert all(difference[real].max() < 1e-2 for difference in differences)
        pairs = zip((keys, values), self.recorder.project(layer_idx, len(columns)), strict=True)
        keys, values = (torch.where(rounded[:, None, :, None], few, full) for full, few in pairs)
        return keys, values


def assert_projected(model: torch.nn.Module, recorder: RankRecorder) -> None:
    """Every logit of the run equals the slow cache's: a wrong token or direction moves them by much more."""
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    text, slow, logits = _recorded(model, recorder), _RankCache(recorder), []
    masks = _masks(model, text)
    for _, group in groupby(range(len(recorder.columns)), lambda at: recorder.columns[at].forward):
        columns = list(group)
        slow.count = len(columns)
        part = slice(columns[0], columns[-1] + 1)
        logits.append(replayed_forward(reference, recorder, text, masks, part, slow))
    assert_said(recorder, torch.cat(logits, dim=1))

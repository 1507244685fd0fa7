"""A slow cache of few bits: everything is kept in full precision, and rounded when it is read.

Which tokens a forward sees rounded follows from positions alone: all but the first four of a row, where they are
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

from closeness import SHARE
from reference import (
    Recorder,
    _additive_mask,
    _recorded,
    assert_said,
    check_layer,
    pads_in_segments,
    replayed_forward,
)
from rounded import slow_round, slow_sizes


class RoundedRecorder(Recorder):
    """Notes which tokens each forward may see as they came, and checks what the cache holds."""

    def __init__(self, model: torch.nn.Module, cache: Any, bits: tuple[int | None, int | None], latent: bool) -> None:
        super().__init__(model, cache)
        self.bits, self.centred = bits, (True, latent)

    def round(self, index: int, count: int | None = None) -> tuple[Tensor, Tensor]:
        """What a layer was given, rounded."""
        rounded = []
        for half, (states, bits) in enumerate(zip(self.came(index, count), self.bits, strict=True)):
            if bits is None or not self.centred[half]:
                rounded.append(slow_round(states, bits, True))
            else:
                offset, sizes = self._offset(index, half, states), self._sizes(index, half)
                rounded.append(slow_round((states - offset) / sizes, bits, True) * sizes + offset)
        return rounded[0], rounded[1]

    def _offset(self, index: int, half: int, states: Tensor) -> Tensor:
        """What is subtracted: the mean over the first forward of each row, turned to where each token stands."""
        rotary = dict(self.cache.paged_layers)[index].store._codecs[half].rotary
        real = torch.tensor([column.real for column in self.columns]).T
        at = (real.long().cumsum(-1) - 1).clamp(min=0)
        plain = self.came(index)[half]
        plain = plain if rotary is None else rotary.unrotate(plain, at[:, None])
        means = []
        for row, first in enumerate(self._first()):
            mean = plain[row][:, first].mean(1) if len(first) > 1 else torch.zeros_like(plain[row][:, 0])
            means.append(mean.bfloat16().to(states))
        mean = torch.stack(means)[:, :, None].expand(-1, -1, states.shape[2], -1)
        return mean if rotary is None else rotary.rotate(mean, at[:, None, : states.shape[2]]).to(states)

    def _first(self) -> list[list[int]]:
        """The columns of each row's first forward, pads left out."""
        columns = []
        for row in range(len(self.columns[0].real)):
            here = [column for column in self.columns if column.real[row]]
            first = here[0].forward if here else None
            columns.append(
                [at for at, column in enumerate(self.columns) if column.real[row] and column.forward == first]
            )
        return columns

    def _sizes(self, index: int, half: int) -> Tensor:
        """What channels are divided by, from the first forward of each row."""
        came = self.came(index)[half]
        left, sizes = came - self._offset(index, half, came), []
        for row, first in enumerate(self._first()):
            sizes.append(slow_sizes(left[row][:, first]) if len(first) > 1 else torch.ones_like(left[row][:, 0]))
        return torch.stack(sizes)[:, :, None]

    def shown(self, index: int, keys: Tensor, count: int) -> Tensor:
        """Keys of the first columns as attention sees them in the forward of the last of these."""
        return keys

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
        for held, states, few in zip((layer.keys, layer.values), came, self.round(index), strict=True):
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
        if layer.store.columns.lengths is not None:
            levels[pads_in_segments(layer)] = 1e3
            continue
        levels[:, :, layer.held :] = math.nan
        held = levels[:, :, : layer.held]
        held.copy_(held.masked_fill(pads, 1e3))


class _RoundedCache(DynamicCache):
    """Gives each forward what it may see, rounded where it must."""

    def __init__(self, recorder: RoundedRecorder) -> None:
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
        pairs = zip((keys, values), self.recorder.round(layer_idx, len(columns)), strict=True)
        keys, values = (torch.where(rounded[:, None, :, None], few, full) for full, few in pairs)
        return self.recorder.shown(layer_idx, keys, len(columns)), values


def rounded_logits(model: torch.nn.Module, recorder: RoundedRecorder) -> Tensor:
    """[rows, columns, vocabulary]: forward by forward, each layer and head masked as recorded, with rounded tokens."""
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    text, slow, logits = _recorded(model, recorder), _RoundedCache(recorder), []
    masks = {layer: _additive_mask(model, sees, text.embeds.dtype) for layer, sees in text.visible.items()}
    for _, group in groupby(range(len(recorder.columns)), lambda at: recorder.columns[at].forward):
        columns = list(group)
        slow.count = len(columns)
        part = slice(columns[0], columns[-1] + 1)
        logits.append(replayed_forward(reference, recorder, text, masks, part, slow))
    return torch.cat(logits, dim=1)


def assert_rounded(model: torch.nn.Module, recorder: RoundedRecorder, share: float = SHARE) -> None:
    """Every logit of the run equals the slow cache's: a wrong token or rounding moves them by much more."""
    assert_said(recorder, rounded_logits(model, recorder), share)

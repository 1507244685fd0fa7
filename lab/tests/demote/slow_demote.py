"""A slow cache of two tiers: everything is kept as it came, and rounded when it is read from the low-bit store."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from reference import Recorder, _masks, _recorded, assert_said, replayed_forward
from rounded import slow_round

Sets = list[list[set[int]]]  # [row][kv head] -> positions or columns


def demoted_positions(layer: Any) -> Sets:
    """What lies in the low-bit store of a layer."""
    heads = layer.keys.shape[1]
    positions = layer.action.state.positions.expand(-1, heads, -1).tolist()
    return [[{p for p in head if p >= 0} for head in heads] for heads in positions]


def poison_empty(layer: Any) -> None:
    """Spoil the places in which no token is."""
    demoted = layer.action.state
    if layer.action.any:
        for levels in (demoted.key_levels, demoted.value_levels):
            empty = (demoted.positions < 0).expand(-1, levels.shape[1], -1)
            levels.copy_(levels.masked_fill(empty[..., None], math.nan))


class DemoteRecorder(Recorder):
    """Notes what each forward saw in few bits, and checks what comes to the low-bit store and leaves it."""

    def __init__(self, model: Any, cache: Any) -> None:
        super().__init__(model, cache, poison=True)
        self.demoted: list[dict[int, Sets]] = []  # [column][layer], columns
        self.queries: dict[int, list[Tensor]] = {}  # [layer][column] [rows, query heads, dim]
        self.scores: dict[int, Any] = {}  # [layer][row][set] position -> score of what is demoted
        self.planned: dict[int, Any] = {}  # the same of the block that is leaving
        self.gone = 0

    def __enter__(self) -> DemoteRecorder:
        super().__enter__()
        for index, layer in self.cache.paged_layers:
            self._replace(layer, "extra_attention", self._follow(index, layer, layer.extra_attention))
            self._replace(layer.action, "plan", self._following_plan(index, layer.action.plan))
            self._replace(layer.action, "evict_token", self._following_tokens(index, layer, layer.action.evict_token))
        return self

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._before(args, kwargs)
        self.demoted += [{} for _ in self.new]

    def _crop(self, count: int) -> None:
        super()._crop(count)
        del self.demoted[len(self.columns) :]
        for queries in self.queries.values():
            del queries[len(self.columns) :]

    def _reorder(self, index: Tensor) -> None:
        super()._reorder(index)
        rows = index.tolist()
        self.demoted = [{at: [sets[row] for row in rows] for at, sets in layers.items()} for layers in self.demoted]
        self.queries = {at: [query[index] for query in queries] for at, queries in self.queries.items()}
        self.scores, self.planned = (
            {at: [copy.deepcopy(sets[row]) for row in rows] for at, sets in layers.items()}
            for layers in (self.scores, self.planned)
        )

    def _follow(self, index: int, layer: Any, beside: Callable[..., Any]) -> Callable[..., Any]:
        def followed(queries: Any, values: Tensor) -> Any:
            poison_empty(layer)
            self.queries.setdefault(index, []).extend(queries.query.detach().clone().unbind(2))
            column_of = self._column_of()
            demoted_rows = [
                [{column_of[row][p] for p in head} for head in heads]
                for row, heads in enumerate(demoted_positions(layer))
            ]
            for at, column in enumerate(self.new, len(self.columns) - len(self.new)):
                for row, real in enumerate(column.real):
                    for head, demoted in enumerate(demoted_rows[row]):
                        visible = column.visible[index][row][head]
                        assert not demoted & visible, "a token is in both places"
                        if real:
                            visible |= demoted
                self.demoted[at][index] = demoted_rows
            return beside(queries, values)

        return followed

    def _following_plan(self, index: int, plan: Callable[..., None]) -> Callable[..., None]:
        def followed(slots: Tensor, begins: Tensor, held: Any) -> None:
            plan(slots, begins, held)
            planned = self.planned.setdefault(index, [[{} for _ in row] for row in begins.tolist()])
            for row, own in begins.nonzero().tolist():
                at = slots[row, own]
                positions, scores = held.positions[row, own, at], held.scores[row, own, at]
                planned[row][own] = dict(zip(positions.tolist(), scores.tolist(), strict=True))

        return followed

    def _following_tokens(self, index: int, layer: Any, evict_token: Callable[..., None]) -> Callable[..., None]:
        def followed(leaving: Any, slots: Tensor | None) -> None:
            rows, sets, _ = leaving.positions.shape
            demoted = self.scores.setdefault(index, [[{} for _ in range(sets)] for _ in range(rows)])
            evict_token(leaving, slots)
            after = layer.action.state.positions.tolist()
            for row in range(rows):
                for own in range(sets):
                    here = demoted[row][own]
                    come = [position for position in leaving.positions[row, own].tolist() if position >= 0]
                    if slots is None:
                        scores = leaving.scores[row, own, leaving.positions[row, own] >= 0].tolist()
                        come = dict(zip(come, scores, strict=True))
                    else:
                        come = {position: self.planned[index][row][own][position] for position in come}
                    assert not here.keys() & come.keys(), "a token leaves its slot twice"
                    here |= come
                    stays = [position for position in after[row][own] if position >= 0]
                    assert len(stays) == len(set(stays)) == min(len(here), layer.action.places)
                    dropped = {position: here.pop(position) for position in here.keys() - set(stays)}
                    assert here.keys() == set(stays)
                    self.gone += len(dropped)
                    if dropped:  # rounding may choose another of nearly equal ones
                        noise = 2e-3 * max(map(abs, (*here.values(), *dropped.values())))
                        assert max(dropped.values()) <= min(here.values()) + noise, "a better token was dropped"

        return followed

    # ---- rounding ---------------------------------------------------------------------------------------------------

    def rounded(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """`[rows, heads, columns, dim]`: what the layer was given, as its low-bit store would say it."""
        settings, columns = self.cache.disposal, self.columns[:count]
        keys, values = (
            torch.stack([getattr(column, name)[index] for column in columns], 2) for name in ("keys", "values")
        )
        channels = torch.stack([self._channels(index, row) for row in range(len(keys))])[:, :, None]
        return slow_round(keys / channels, settings.bits, False) * channels, slow_round(values, settings.bits, False)

    def _channels(self, index: int, row: int) -> Tensor:
        real = [at for at, column in enumerate(self.columns) if column.real[row]]
        first = [at for at in real if self.columns[at].forward == self.columns[real[0]].forward]
        keys = [self.columns[at].keys[index][row] for at in first]
        factors = torch.ones_like(self.columns[0].keys[index][row])
        if len(first) > 1:
            heads = len(factors)
            for head in range(heads):
                for channel in range(factors.shape[1]):
                    own = [self.queries[index][at][row].unflatten(0, (heads, -1))[head, :, channel] for at in first]
                    largest = max(query.abs().max().item() for query in own)
                    root = math.sqrt(max(abs(key[head, channel].item()) for key in keys) / largest)
                    mantissa, exponent = math.frexp(root)
                    factors[head, channel] = math.ldexp(round(mantissa * 16) / 16, exponent)
        return factors


class _TwoTierCache(DynamicCache):
    """Gives each forward the tokens that it saw in few bits rounded."""

    def __init__(self, recorder: DemoteRecorder) -> None:
        super().__init__(config=recorder.model.config)
        self.recorder = recorder

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        count = keys.shape[2]
        sets = self.recorder.demoted[count - 1].get(layer_idx)
        if sets is None:  # a layer that is not paged
            return keys, values
        few = torch.tensor([[[at in columns for at in range(count)] for columns in heads] for heads in sets])
        pairs = zip((keys, values), self.recorder.rounded(layer_idx, count), strict=True)
        keys, values = (torch.where(few[..., None], rounded, states) for states, rounded in pairs)
        return keys, values


def assert_two_tiers(model: Any, recorder: DemoteRecorder) -> None:
    """Every logit of the run equals the slow cache's."""
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    text, slow, logits = _recorded(model, recorder), _TwoTierCache(recorder), []
    masks = _masks(model, text)
    for _, group in groupby(range(len(recorder.columns)), lambda at: recorder.columns[at].forward):
        columns = list(group)
        part = slice(columns[0], columns[-1] + 1)
        logits.append(replayed_forward(reference, recorder, text, masks, part, slow))
    assert_said(recorder, torch.cat(logits, dim=1))

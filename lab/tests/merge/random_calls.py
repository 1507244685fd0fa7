"""Random sequences of calls against the rule played with lists.

No model: the test plays one, down to the mask that transformers builds. Every key carries the number of its token, so
it shows which tokens the mask lets a query see, and scores are small fractions with many exact ties.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache as memoize
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

import models
from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext
from hf_paged_eviction.integration.rotary import Rotary
from hf_paged_eviction.table.budget import BlockBudget
from reference import SlowLayer, Vector

LAYERS = 2


@dataclass(frozen=True)
class FirstValue(EvictionPolicy):
    """The score is the first number of the value: exact in every order of summation."""

    needs = Needs(token_local=True)

    def score(self, context: ScoreContext) -> Tensor:
        return context.values[..., 0].float()


@dataclass(frozen=True)
class ComparedFirstValue(FirstValue):
    """The same, declared as a score that depends on the other tokens: another path, the same result."""

    needs = Needs(token_local=False)


def slow_first_value(
    keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int
) -> list[float]:
    return [value[0] for value in values]


@memoize
def config() -> Any:
    return models.family_config("llama")


@memoize
def standing_still() -> Rotary:
    """Turns nothing: attention must always see what came, whatever the shifts are."""
    return Rotary(torch.zeros(2), torch.arange(2), torch.ones(2), torch.ones(2))


class Play:
    """A cache and its slow twins, fed with the same tokens."""

    def __init__(
        self,
        rows: int,
        heads: int,
        budget: int,
        block_size: int,
        sink_tokens: int,
        recent: int | None,
        separate: bool,
        compared: bool = False,
        recording: bool = False,
        closing: bool = False,
        seed: int = 0,
        disposal: Any = "drop",
        spans: Any = None,
    ) -> None:
        smallest = BlockBudget.validate("1%", block_size, sink_tokens, recent, spans).smallest
        budget = max(budget, smallest)  # the bound itself is played
        own = ComparedFirstValue() if compared else FirstValue()
        self.cache = models.paged(
            config(),
            budget=budget,
            block_size=block_size,
            policy=own,
            heads="separate" if separate else "shared",
            sink_tokens=sink_tokens,
            recent_tokens=recent,
            record_past=recording,
            disposal=disposal,
            protect=spans,
        )
        self.slow = [
            SlowLayer(budget, block_size, sink_tokens, slow_first_value, not separate, layer, recent, by_row(spans))
            for layer in range(LAYERS)
        ]
        for layer in self.slow:
            layer.recording = recording
        self.closing = closing
        if closing:
            for layer in self.cache.layers:
                layer.store.rerotation = standing_still()
        self.heads, self.rows = heads, rows
        self.mask = torch.ones(rows, 0, dtype=torch.long)
        self.random = torch.Generator().manual_seed(seed)
        self.next_token = 0

    def draw(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.random)

    def feed(self, count: int, pads: str) -> None:
        """A forward of `count` columns; `pads`: none, left or any."""
        real = torch.ones(self.rows, count, dtype=torch.long)
        if pads == "left":
            real = (torch.arange(count) >= self.draw(count, self.rows, 1)).long()
        elif pads == "any":
            real = (self.draw(4, self.rows, count) > 0).long()
        self.mask = torch.cat([self.mask, real], dim=1)
        numbers = self.next_token + torch.arange(self.rows * count).view(self.rows, 1, count)
        self.next_token += self.rows * count
        length, offset = self.cache.get_mask_sizes(count, 0)
        visible = AttentionMaskInterface._global_mapping["sdpa"](
            batch_size=self.rows,
            q_length=count,
            kv_length=length,
            q_offset=self.cache.get_seq_length(),
            kv_offset=offset,
            attention_mask=self.mask.bool(),
            allow_is_causal_skip=False,
        )
        assert self.cache.get_mask_sizes(count, LAYERS - 1) == (length, offset)
        for index in range(LAYERS):
            self._feed_layer(index, count, real, numbers, visible, length)

    def _feed_layer(self, index: int, count: int, real: Tensor, numbers: Tensor, visible: Tensor, length: int) -> None:
        numbers = numbers.expand(-1, self.heads, -1)
        keys = torch.stack([numbers, torch.full_like(numbers, index)], dim=-1).float()
        score = self.draw(17, self.rows, self.heads, count).sub(8) / 8
        values = torch.stack([score, numbers.float()], dim=-1)
        slow = self.slow[index]
        slow.commit(0)
        before = self._held(slow)
        was_full = slow.held == slow.budget
        returned, _ = self.cache.update(keys, values, index)
        slow.feed(keys, values, real.bool().tolist())
        assert returned.shape[2] == length, "the mask has one column per key"
        after = self._held(slow) if count == 1 and was_full and not slow.recording else None
        # Lists from here on: indexing tensors one by one would be most of the time of these tests.
        is_real, came, returned, seen = real.tolist(), keys.tolist(), returned.tolist(), visible[:, 0].tolist()
        for row, head in product(range(self.rows), range(self.heads)):
            for query in range(count):
                if is_real[row][query]:
                    new = [came[row][head][i] for i in range(query + 1) if is_real[row][i]]
                    expected = after[row][head] if after is not None else [*before[row][head], *new]
                    sees = [key for key, whether in zip(returned[row][head], seen[row][query], strict=True) if whether]
                    assert _as_set(sees) == _as_set(expected), "attention sees other tokens"

    def _held(self, slow: SlowLayer) -> list[list[list[list[float]]]]:
        if not slow.rows:
            return [[[] for _ in range(self.heads)] for _ in range(self.rows)]
        return [
            [[token.keys[head] for token in slow.group(row, head).tokens] for head in range(self.heads)]
            for row in range(self.rows)
        ]

    def crop(self, count: int, absolute: bool) -> None:
        count = min(count, self.cache.get_seq_length())
        left = self.cache.get_seq_length() - count
        argument = left if absolute and left else -count
        twins = copy.deepcopy(self.slow)
        try:
            for layer in twins:
                layer.crop(count)
        except ValueError:
            with pytest.raises(ValueError, match="evicted"):
                self.cache.crop(argument)
            return  # and nothing has changed
        self.cache.crop(argument)
        self.slow = twins
        self.mask = self.mask[:, : self.mask.shape[1] - count]
        if not self.mask.shape[1]:
            self._empty()

    def reorder(self, kind: str) -> None:
        if not self.mask.shape[1]:
            return
        if kind == "repeat":
            index = torch.arange(self.rows).repeat_interleave(2)
            if len(index) > 6:
                return
            self.cache.batch_repeat_interleave(2)
        elif kind == "select":
            index = self.draw(self.rows, max(1, self.rows - 1))
            self.cache.batch_select_indices(index)
        else:
            index = self.draw(self.rows, self.rows)
            self.cache.reorder_cache(index)
        for layer in self.slow:
            layer.reorder(index.tolist())
        self.mask, self.rows = self.mask[index], len(index)

    def protect(self, spans: list[Any]) -> None:
        spans = spans if self.rows % max(len(by_row(spans)), 1) == 0 else []
        try:
            self.cache.protect(spans)
        except ValueError as error:
            assert "Smallest legal budget" in str(error)
            return
        for layer in self.slow:
            layer.protect(by_row(spans))

    def reset(self) -> None:
        rows = len(self.slow[0].spans)
        self.cache.reset()
        self._empty()
        if self.rows % max(rows, 1):  # the next batch is another
            self.protect([])

    def _empty(self) -> None:
        for layer in self.slow:
            layer.rows, layer.held = [], 0
        self.mask = self.mask[:, :0]

    def check(self) -> None:
        """Everything that can be read is what the lists say."""
        if not self.slow[0].rows:
            assert self.cache.get_seq_length() == 0
            return
        assert self.cache.get_seq_length() == self.slow[0].seen == self.mask.shape[1]
        evicted = 0
        for index, slow in enumerate(self.slow):
            layer = self.cache.layers[index]
            if not slow.held:
                assert layer.held == 0
                continue
            assert layer.held == slow.held <= slow.budget
            assert slow.held <= layer.keys.shape[2] == layer.values.shape[2] <= slow.budget
            table, scores = self.cache.block_table(index), self.cache.block_scores(index)
            states = layer.keys.tolist(), layer.values.tolist()
            for row in range(self.rows):
                for head in range(self.heads):
                    self._check_head(slow, layer, row, head, table, scores, states)
                waiting = sum(token is not None for token in slow.rows[row].pending)
                evicted += sum(slow.rows[row].columns) - waiting - len(slow.group(row, 0).tokens)
        assert self.cache.stats().evicted_tokens == evicted

    def _check_head(
        self, slow: SlowLayer, layer: Any, row: int, head: int, table: Tensor, scores: Tensor, states: Any
    ) -> None:
        group = slow.group(row, head)
        slots = layer.positions[row, head].tolist()
        assert slots.count(-1) == group.pads
        by_position = {token.position: token for token in group.tokens}
        assert sorted(p for p in slots if p >= 0) == sorted(by_position)
        for slot, position in enumerate(slots):
            if position >= 0:
                token = by_position[position]
                assert [kind[row][head][slot] for kind in states] == [token.keys[head], token.values[head]]
        if self.closing:
            shifts = dict(zip(slots, layer.shifts[row, head].tolist(), strict=True))
            assert {p: shifts[p] for p in by_position} == {p: group.shifts[p] for p in by_position}
        logical = [token.position for token in group.tokens]
        padding = [-1] * (slow.budget - len(logical))
        assert table[row, head].flatten().tolist() == logical + padding
        filled = slow.block_scores(row, head)
        assert scores[row, head, len(filled) :].isnan().all()
        assert scores[row, head, : len(filled)].tolist() == pytest.approx(filled, rel=1e-4, abs=1e-5)


def by_row(spans: Any) -> list[list[tuple[int, int]]]:
    """Spans for all rows as one entry; none as no entry."""
    if not spans:
        return []
    return [spans] if isinstance(spans[0], tuple) else spans


def _as_set(keys: list[list[float]]) -> set[tuple[float, ...]]:
    rows = [tuple(key) for key in keys]
    assert len(rows) == len(set(rows))
    return set(rows)


SPAN = st.tuples(st.integers(0, 60), st.integers(1, 7)).map(lambda span: (span[0], sum(span)))
#: For all rows, or for each of one, two or three.
SPANS = st.one_of(st.just([]), st.lists(SPAN, max_size=3), st.lists(st.lists(SPAN, max_size=2), max_size=3))
FEED = st.tuples(st.just("feed"), st.integers(1, 20), st.sampled_from(["none", "left", "any"]))
DECODE = st.tuples(st.just("decode"), st.integers(1, 14), st.sampled_from(["none", "none", "none", "any"]))
CROP = st.tuples(st.just("crop"), st.integers(0, 6), st.booleans())
ROWS = st.tuples(st.just("rows"), st.sampled_from(["reorder", "select", "repeat"]))
RESET = st.tuples(st.just("reset"))
COPY = st.tuples(st.just("copy"))
PROTECT = st.tuples(st.just("protect"), SPANS)
CALLS = st.lists(st.one_of(FEED, DECODE, DECODE, CROP, ROWS, RESET, COPY, PROTECT), min_size=1, max_size=9)
#: Budget, block size, tokens at the start and newest tokens that stay.
SIZES = st.sampled_from(
    [
        *((8, 4, 0, None), (12, 4, 4, None), (12, 4, 3, 2), (16, 4, 4, 0), (20, 4, 6, 6), (24, 4, 0, 15)),
        *((3, 1, 1, None), (6, 1, 2, 3), (8, 2, 2, 1), (10, 2, 5, None), (16, 2, 3, 9)),
    ]
)


def play(game: Play, calls: list[tuple[Any, ...]]) -> None:
    """Make the calls, compare after each."""
    for call in calls:
        if call[0] == "feed":
            game.feed(call[1], call[2])
        elif call[0] == "decode":
            for _ in range(call[1]):
                game.feed(1, call[2])
                game.check()
        elif call[0] == "crop":
            game.crop(call[1], call[2])
        elif call[0] == "rows":
            game.reorder(call[1])
        elif call[0] == "protect":
            game.protect(call[1])
        elif call[0] == "copy":
            game.cache = copy.deepcopy(game.cache)
        else:
            game.reset()
        game.check()

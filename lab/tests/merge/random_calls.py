"""Random sequences of calls of a cache, played with lists. No model: the test plays one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache as memoize
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from slow_merge import SlowMerge
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

import models
from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext
from hf_paged_eviction.table.budget import BlockBudget
from reference import Vector

LAYERS = 2


@dataclass(frozen=True)
class FirstValue(EvictionPolicy):
    """The score is the first number of the value: exact in every order of summation."""

    needs = Needs(token_local=True)

    def score(self, context: ScoreContext) -> Tensor:
        return context.values[..., 0].float()


def slow_first_value(
    keys: list[Vector], values: list[Vector], positions: list[int], layer: int, head: int
) -> list[float]:
    return [value[0] for value in values]


@memoize
def config() -> Any:
    return models.family_config("llama")


class Play:
    """A cache and its slow twins, fed with the same tokens. `feed_layer` and `check` are the test's."""

    def __init__(
        self,
        rows: int,
        heads: int,
        sizes: tuple[int, int, int, int | None],
        separate: bool,
        recording: bool,
        seed: int,
        disposal: Any,
    ) -> None:
        budget, block_size, sink_tokens, recent = sizes
        smallest = BlockBudget.validate("1%", block_size, sink_tokens, recent, None).smallest
        budget = max(budget, smallest)  # the bound itself is played
        self.cache = models.paged(
            config(),
            budget=budget,
            block_size=block_size,
            policy=FirstValue(),
            heads="separate" if separate else "shared",
            sink_tokens=sink_tokens,
            recent_tokens=recent,
            record_past=recording,
            disposal=disposal,
        )
        fixed = None if disposal.threshold == "ema" else disposal.threshold
        shape = budget, block_size, sink_tokens, slow_first_value, not separate
        self.slow = [
            SlowMerge(*shape, layer, recent, values_only=disposal.values_only, threshold=fixed)
            for layer in range(LAYERS)
        ]
        self.heads, self.rows = heads, rows
        self.mask = torch.ones(rows, 0, dtype=torch.long)
        self.random = torch.Generator().manual_seed(seed)

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
        length, offset = self.cache.get_mask_sizes(count, 0)
        AttentionMaskInterface._global_mapping["sdpa"](
            batch_size=self.rows,
            q_length=count,
            kv_length=length,
            q_offset=self.cache.get_seq_length(),
            kv_offset=offset,
            attention_mask=self.mask.bool(),
            allow_is_causal_skip=False,
        )
        for index in range(LAYERS):
            self.feed_layer(index, count, real)

    def feed_layer(self, index: int, count: int, real: Tensor) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

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


def by_row(spans: Any) -> list[list[tuple[int, int]]]:
    """Spans for all rows as one entry; none as no entry."""
    if not spans:
        return []
    return [spans] if isinstance(spans[0], tuple) else spans


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

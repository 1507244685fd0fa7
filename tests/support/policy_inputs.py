"""What policies are given, and the same as lists for the slow versions of them."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged_eviction import EvictionPolicy, ScoreContext
from hf_paged_eviction.attention.weights import Attention, Logits
from hf_paged_eviction.integration.rotary import Rotary
from hf_paged_eviction.policies import QueryCount

Vector = list[float]
GROUP = 2
BUDGET = 8  # tokens that the layer may hold
#: Of the six channels of a key, 0 turns with 2 and 1 with 3; the last two stay. Rotated states are 1.25 times as long.
SPEEDS = (0.7, 0.05)
STRETCH = 1.25
ROTARY = Rotary(torch.tensor(SPEEDS), torch.full((2,), STRETCH))


@dataclass(frozen=True)
class Text:
    """Rows of a batch and a query for every token; the rows start with pads full of nonsense.

    Shapes: keys `[B, H, T, D]`, values `[B, H, T, Dv]`, queries `[B, G * H, T, D]`, positions `[B, H, T]`.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: Tensor
    scaling: float = 0.4
    rotary: Rotary | None = ROTARY

    @property
    def query_positions(self) -> Tensor:
        """`[B, T]`, in the order of the text."""
        return self.positions[:, 0].sort(dim=-1).values

    def attention(self, columns: Sequence[int]) -> Attention:
        """Of these queries."""
        index = list(columns)
        return Attention(
            self.queries[:, :, index],
            self.keys,
            self.query_positions[:, index],
            self.positions,
            Logits(self.scaling),
            rotary=self.rotary,
        )

    def context(self, policy: EvictionPolicy, pieces: Sequence[Sequence[int]]) -> ScoreContext:
        """After the policy has observed these pieces of the queries."""
        statistics = {name: torch.zeros(self.positions.shape) for name in policy.needs.token_statistics}
        for columns in pieces if policy.needs.queries else ():
            statistics = policy.observe(statistics, self.attention(columns))
        for name, numbers in statistics.items():
            assert numbers.dtype == torch.float32, name
        assert set(statistics) == {*policy.needs.token_statistics, *policy.needs.row_statistics}
        seen = self.positions[:, 0].amax(-1) + 1
        none = torch.zeros_like(seen)
        observed = QueryCount(seen if pieces else none, none, none)
        return ScoreContext(
            self.keys,
            self.values,
            self.positions,
            seen,
            1,
            statistics,
            observed=observed,
            budget=BUDGET,
            rotary=self.rotary,
        )

    def all_pieces(self, policy: EvictionPolicy, size: int | None = None) -> list[list[int]]:
        """The queries that the cache shows of a whole prompt."""
        tokens = self.positions.shape[-1]
        first = 0 if policy.needs.window is None else max(0, tokens - policy.needs.window)
        size = size or tokens
        return [list(range(start, min(start + size, tokens))) for start in range(first, tokens, size)]


def text(rows: int = 3, heads: int = 2, tokens: int = 15, seed: int = 0, dtype: torch.dtype = torch.float32) -> Text:
    """Random states; the rows have 0, 2, 4 ... pads."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, heads, tokens, 6, generator=generator) + torch.randn(6, generator=generator)
    values = torch.randn(rows, heads, tokens, 4, generator=generator)
    queries = torch.randn(rows, GROUP * heads, tokens, 6, generator=generator) * 2
    positions = torch.arange(tokens) - 2 * torch.arange(rows)[:, None]
    pads = positions < 0
    positions = positions.masked_fill(pads, -1)[:, None].expand(-1, heads, -1).contiguous()
    keys = keys.masked_fill(pads[:, None, :, None], 1e4)
    values = values.masked_fill(pads[:, None, :, None], -1e4)
    return Text(keys.to(dtype), values.to(dtype), queries.to(dtype), positions)


@dataclass(frozen=True)
class Head:
    """The real tokens of one row and KV head in the order of the text, as lists.

    `weights[g][q][t]`: attention of query head `g`, query `q` (of the text's `q`-th token) to token `t`.
    """

    keys: list[Vector]
    values: list[Vector]
    queries: list[list[Vector]]
    weights: list[list[Vector]]
    siblings: list[Head]  # all heads of the row, this one included

    @property
    def unrotated_keys(self) -> list[Vector]:
        return [turned(key, -at, 1 / STRETCH) for at, key in enumerate(self.keys)]

    @property
    def unrotated_queries(self) -> list[list[Vector]]:
        return [[turned(query, -at, 1 / STRETCH) for at, query in enumerate(one)] for one in self.queries]

    @property
    def length(self) -> int:
        return len(self.keys)


def turned(state: Vector, by: float, stretch: float = STRETCH) -> Vector:
    """The rotation in complex numbers: each pair of channels is one, and turns by so many positions."""
    real, imaginary = state[:2], state[2:4]
    pairs = [complex(a, b) * stretch * cmath.exp(1j * by * f) for a, b, f in zip(real, imaginary, SPEEDS, strict=True)]
    return [*(pair.real for pair in pairs), *(pair.imag for pair in pairs), *state[4:]]


def heads_of(text: Text, row: int) -> list[Head]:
    """One row as lists."""
    siblings: list[Head] = []
    real = text.query_positions[row] >= 0
    for head in range(text.keys.shape[1]):
        order = [text.positions[row, head].tolist().index(at) for at in range(int(real.sum()))]
        keys, values = text.keys[row, head, order].tolist(), text.values[row, head, order].tolist()
        mine = text.queries[row, GROUP * head : GROUP * (head + 1)][:, real].tolist()
        weights = [[_softmax_row(query, keys, at, text.scaling) for at, query in enumerate(one)] for one in mine]
        siblings.append(Head(keys, values, mine, weights, siblings))
    return siblings


def _softmax_row(query: Vector, keys: list[Vector], last: int, scaling: float) -> Vector:
    logits = [scaling * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys[: last + 1]]
    total = sum(math.exp(logit - max(logits)) for logit in logits)
    seen = [math.exp(logit - max(logits)) / total for logit in logits]
    return seen + [0.0] * (len(keys) - last - 1)

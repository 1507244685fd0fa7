"""A layer of few bits through random sequences of calls, against lists of tokens with a flag each."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from torch import Tensor

from hf_paged_eviction.integration.rotary import Rotary
from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction.policies import make_policy
from hf_paged_eviction.precision.codec import Codec
from hf_paged_eviction.precision.coded import CodedStore
from hf_paged_eviction.table.budget import BlockBudget
from rounded import slow_round, slow_sizes

HEADS, DIM, BLOCK, BITS = 2, 6, 3, 4
#: Channels 0 and 2 turn together, 1 and 3, and the last two do not turn.
FREQUENCIES = (0.7, 0.1)


def rotary() -> Rotary:
    partners, signs = torch.tensor([2, 3, 0, 1]), torch.tensor([-1.0, -1.0, 1.0, 1.0])
    return Rotary(torch.tensor(FREQUENCIES * 2), partners, signs, torch.ones(4))


def slow_turned(state: Tensor, position: int) -> Tensor:
    """`[heads, dim]` turned by so many positions: each pair of channels is a complex number."""
    turned = state.clone()
    for at, frequency in enumerate(FREQUENCIES):
        angle = torch.tensor(position * torch.tensor(frequency).item())
        turned[:, at] = state[:, at] * angle.cos() - state[:, at + 2] * angle.sin()
        turned[:, at + 2] = state[:, at + 2] * angle.cos() + state[:, at] * angle.sin()
    return turned


@dataclass
class Token:
    """A real token of a row, and whether it is rounded for good."""

    key: Tensor  # [HEADS, DIM]
    value: Tensor
    rounded: bool = False
    codes: list[Tensor] | None = None
    few: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # per head, once it is rounded


class Slow:
    """What a layer should hold, by position: rows of tokens, evicted or not."""

    def __init__(self, rows: int, protected: int) -> None:
        self.rows: list[list[Token]] = [[] for _ in range(rows)]
        self.real = torch.ones(rows, 0, dtype=torch.bool)  # by column
        self.protected = protected
        self.means = [torch.zeros(HEADS, DIM, dtype=torch.float64)] * rows
        self.sizes = [torch.ones(HEADS, DIM, dtype=torch.float64)] * rows

    def came(self, keys: Tensor, values: Tensor, real: Tensor) -> None:
        for row, tokens in enumerate(self.rows):
            first = [keys[row, :, at] for at in range(keys.shape[2]) if real[row, at]]
            if not tokens and len(first) > 1:
                plain = [slow_turned(key, -position) for position, key in enumerate(first)]
                self.means[row] = mean = torch.stack(plain).mean(0).bfloat16().double()
                left = [key - slow_turned(mean, position) for position, key in enumerate(first)]
                self.sizes[row] = slow_sizes(torch.stack(left, 1))
            tokens += [Token(keys[row, :, at], values[row, :, at]) for at in range(keys.shape[2]) if real[row, at]]
            for position, token in enumerate(tokens):
                token.rounded |= min(self.protected, 4) <= position < len(tokens) - BLOCK

    def compare(self, layer: PagedLayer) -> None:
        keys, values, store = layer.keys, layer.values, layer.store
        assert isinstance(store, CodedStore)
        assert keys is not None and values is not None
        for row, per_head in enumerate(layer.positions.tolist()):
            for head, positions in enumerate(per_head):
                slots = [slot for slot, position in enumerate(positions) if position >= 0]
                wanted = [self._states(row, head, positions[slot]) for slot in slots]
                for states, expected in zip((keys, values), zip(*wanted, strict=True), strict=False):
                    place = f"row {row}, head {head}, tokens {positions}"
                    assert torch.allclose(states[row, head, slots], torch.stack(expected), rtol=0, atol=1e-6), place
                if head == 0:
                    self._same_codes(store, row, positions)

    def _states(self, row: int, head: int, position: int) -> tuple[Tensor, Tensor]:
        token = self.rows[row][position]
        key, value = token.key[head], token.value[head]
        if not token.rounded:
            return key, value
        if head not in token.few:
            mean, sizes = slow_turned(self.means[row], position)[head], self.sizes[row][head]
            rounded = slow_round((key - mean) / sizes, BITS, True) * sizes + mean
            token.few[head] = rounded, slow_round(value, BITS, True)
        return token.few[head]

    def _same_codes(self, store: CodedStore, row: int, positions: list[int]) -> None:
        for slot, position in enumerate(positions):
            if position >= 0 and (token := self.rows[row][position]).rounded:
                codes = [part[row, 0, slot].clone() for part in store.tensors]  # of its position, too
                assert token.codes is None or all(map(torch.equal, token.codes, codes)), "encoded again"
                token.codes = codes


@pytest.mark.parametrize("recent", [None, 0, 1])
@pytest.mark.parametrize("sinks", [0, 2, 4])
@pytest.mark.parametrize("policy", ["key_norm", "keydiff", "recency"])
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(seed: int, policy: str, sinks: int, recent: int | None, heads: str) -> None:
    torch.manual_seed(seed)
    draw, rows = Random(seed), 3
    budget = BlockBudget.validate(8 * BLOCK, BLOCK, sinks, recent)
    codecs = Codec(BITS, turned=True, centred=True, rotary=rotary()), Codec(BITS, turned=True)
    layer = PagedLayer(budget, make_policy(policy), heads, codecs=codecs)  # type: ignore[arg-type]
    layer.padding.expected = False
    slow = Slow(rows, sinks)
    for _ in range(35):
        action = draw.random()
        if layer.held and action < 0.12:
            crop(layer, slow, draw)
        elif layer.held and action < 0.2:
            index = [draw.randrange(rows) for _ in range(rows)]
            layer.reorder_cache(torch.tensor(index))
            slow.rows = [[Token(**vars(token)) for token in slow.rows[row]] for row in index]
            slow.real = slow.real[index]
            slow.means, slow.sizes = ([each[row] for row in index] for each in (slow.means, slow.sizes))
            layer.padding.map_rows(lambda known, index=index: known[index], rows)
        elif layer.held and action < 0.25:
            layer.offload()
            layer.prefetch()
        else:
            feed(layer, slow, draw, rows)
        if layer.held:
            slow.compare(layer)


def feed(layer: PagedLayer, slow: Slow, draw: Random, rows: int) -> None:
    count = 1 if layer.held and draw.random() < 0.8 else draw.choice([1, 2, 5, 9, 30])
    real = torch.ones(rows, count, dtype=torch.bool)
    if count > 1 and draw.random() < 0.6:
        for row in range(rows):
            real[row, : draw.randrange(count)] = False
    elif count == 1 and draw.random() < 0.2:
        real[draw.randrange(rows)] = False
    seen = layer.get_seq_length()
    slow.real = torch.cat([slow.real, real], dim=1)
    layer.padding.observe(slow.real.long(), seen, seen + count, rows)
    keys, values = torch.randn(2, rows, HEADS, count, DIM, dtype=torch.float64)
    seen_k, seen_v = layer.update(keys, values)
    slow.came(keys, values, real)
    if count > 1:  # of the forward's own tokens attention sees everything
        assert torch.equal(seen_k[:, :, -count:], keys)
        assert torch.equal(seen_v[:, :, -count:], values)


def crop(layer: PagedLayer, slow: Slow, draw: Random) -> None:
    count = draw.randrange(layer.get_seq_length())
    left = layer.get_seq_length() - count
    try:
        layer.check_crop(-count)
    except ValueError:
        return  # some of them have been evicted
    for row, tokens in enumerate(slow.rows):
        gone = int(slow.real[row, left:].sum())
        del tokens[len(tokens) - gone :]
    slow.real = slow.real[:, :left]
    layer.crop(-count)

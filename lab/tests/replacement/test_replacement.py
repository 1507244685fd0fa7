"""Replacements: faults on traces, and what predictions are worth when they are right or wrong."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged_eviction_lab.replacement import (
    Belady,
    Flush,
    Learned,
    Lfu,
    Lru,
    Mark0,
    MarkPredict,
    Random,
    Replacement,
    Resident,
    faults,
)
from hf_paged_eviction_lab.replacement.base import scramble

#: Those that need not know the future.
ONLINE: tuple[Replacement, ...] = (Lru(), Lfu(), Random(), Learned(), Mark0(), MarkPredict(), Flush())
Trace = list[set[int]]
TRACES = st.lists(st.integers(0, 7), min_size=1, max_size=60).map(lambda blocks: [{block} for block in blocks])


def slow_lru(trace: Trace, frames: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    count = 0
    for (block,) in trace:
        count += block not in cache
        if block not in cache and len(cache) == frames:
            cache.popitem(last=False)
        cache[block] = None
        cache.move_to_end(block)
    return count


def slow_belady(trace: Trace, frames: int) -> tuple[int, list[set[int]]]:
    """Faults, and at each moment which of all blocks leave before they are asked for again."""
    cache: set[int] = set()
    count, left_at = 0, []
    for at, (block,) in enumerate(trace):
        left = None
        if block not in cache:
            count += 1
            if len(cache) == frames:
                left = max(cache, key=lambda held: (following(trace, held, at), -held))
                cache.remove(left)
            cache.add(block)
        left_at.append(left)
    bits: list[set[int]] = []
    present: set[int] = set()
    for at, (block,) in enumerate(trace):
        # Does the block that was asked for now leave before it is asked for again? The others keep their bit.
        end = following(trace, block, at)
        goes = block in left_at[at + 1 : end + 1]
        present = present | {block} if goes else present - {block}
        bits.append(set(present))
    return count, bits


def slow_mark0(trace: Trace, frames: int, bits: list[set[int]]) -> int:
    """With the set S of what was there when the phase began, as in the paper. Chance is drawn as the package does."""
    cache: set[int] = set()
    start: set[int] = set()
    visited: set[int] = set()
    count = 0
    for at, (block,) in enumerate(trace):
        visited.add(block)
        if block in cache:
            continue
        count += 1
        if len(cache) == frames:
            pool = cache & bits[at - 1]
            if not pool:
                if not (start & cache) - visited:
                    start, visited = set(cache), {block}
                # Who comes is visited: what is not visited in the cache is of S, whoever asks.
                pool = cache - visited
            left = min(pool, key=lambda held: (int(scramble(torch.tensor(held), torch.tensor(at))), held))
            cache.remove(left)
        cache.add(block)
    return count


def slow_flush(trace: Trace, frames: int, bits: list[set[int]]) -> int:
    """Where no bit says who may go, all are given up; who is asked for before it has left is taken back."""
    cache: dict[int, int] = {}  # when each was asked for last
    given_up: set[int] = set()
    count = 0
    for at, (block,) in enumerate(trace):
        given_up.discard(block)
        if block not in cache:
            count += 1
            if len(cache) == frames:
                if not cache.keys() & (given_up | bits[at - 1]):
                    given_up = set(cache)
                del cache[min(cache.keys() & (given_up | bits[at - 1]), key=cache.__getitem__)]
        cache[block] = at
    return count


def following(trace: Trace, block: int, at: int) -> int:
    return next((later for later in range(at + 1, len(trace)) if block in trace[later]), len(trace))


@settings(max_examples=25)
@given(TRACES, st.integers(1, 5))
def test_against_slow_twins(trace: Trace, frames: int) -> None:
    assert faults(trace, frames, Lru()) == slow_lru(trace, frames)
    best, bits = slow_belady(trace, frames)
    assert faults(trace, frames, Belady(trace)) == best
    for replacement in ONLINE:
        assert faults(trace, frames, replacement) >= best
    # Who knows what leaves does as well as who knows the future.
    for replacement in (Mark0(), Flush()):
        assert faults(trace, frames, replacement, bits) == best


@settings(max_examples=40)
@given(TRACES, st.integers(2, 5), st.integers(0, 999), st.sampled_from([0.05, 0.3]))
def test_marking_is_that_of_the_paper(trace: Trace, frames: int, seed: int, share: float) -> None:
    draw = random.Random(seed)
    bits = [{block for block in range(8) if draw.random() < share} for _ in trace]
    assert faults(trace, frames, Mark0(), bits) == slow_mark0(trace, frames, bits)
    assert faults(trace, frames, Flush(), bits) == slow_flush(trace, frames, bits)


def harmonic(count: int) -> float:
    return sum(1 / n for n in range(1, count + 1))


def wrong_bits(trace: Trace, right: list[set[int]], given_bits: list[set[int]]) -> tuple[int, int]:
    """How often "keep", and how often "goes", was said in error of the block that was asked for."""
    keep = goes = 0
    for (block,), truth, bits in zip(trace, right, given_bits, strict=True):
        keep += block in truth and block not in bits
        goes += block not in truth and block in bits
    return keep, goes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("adversary", ["inverted", "all", "none", "coin"])
def test_adversarial_bits_stay_within_the_bound(adversary: str, seed: int) -> None:
    """MARK0: faults <= OPT + 2 H_k wrong "keep" + wrong "goes", and its deterministic variant with k - 1 for 2 H_k.
    MARK&PREDICT: O(log k) OPT whatever the bits."""
    draw = random.Random(seed)
    frames = 6
    hot = [draw.randrange(9) for _ in range(80)]
    trace = [{block} for block in hot + list(range(8)) * 6 + [draw.randrange(20) for _ in range(60)]]
    best, right = slow_belady(trace, frames)
    blocks = set().union(*trace)
    bits = {
        "inverted": [blocks - truth for truth in right],
        "all": [blocks for _ in right],
        "none": [set() for _ in right],
        "coin": [{block for block in blocks if draw.random() < 0.5} for _ in right],
    }[adversary]
    keep, goes = wrong_bits(trace, right, bits)
    mark0, predict, flush = (faults(trace, frames, rule, bits) for rule in (Mark0(), MarkPredict(), Flush()))
    assert best <= mark0 <= best + 2 * harmonic(frames) * keep + goes
    assert best <= flush <= best + (frames - 1) * keep + goes
    assert best <= predict <= 2 * harmonic(frames) * best + frames
    assert (keep, goes) != (0, 0)


def test_several_blocks_at_a_time() -> None:
    trace = [{1, 2, 3}, {3, 4, 5}, {1, 2}, {4, 5, 6}]
    assert faults(trace, 4, Belady(trace)) == 3 + 2 + 1 + 1
    assert faults(trace, 9, Lru()) == 6
    with pytest.raises(ValueError, match=r"3.*2 frames"):
        faults(trace, 2, Lru())


def test_belady_needs_the_future() -> None:
    with pytest.raises(ValueError, match="lower bound"):
        Belady()


def test_ranks_depend_on_nothing_but_the_row() -> None:
    """Rows of a batch get what they get alone."""
    generator = torch.Generator().manual_seed(0)
    draw: Any = lambda high: torch.randint(high, (5, 2, 7), generator=generator)  # noqa: E731
    resident = Resident(draw(50), draw(9), draw(2).bool(), draw(40)[..., 0])
    ids = torch.stack([torch.randperm(30, generator=generator)[:14].view(2, 7) for _ in range(5)])
    now = torch.arange(50, 55)
    for replacement in ONLINE:
        together = replacement.ranks(resident, ids, now)
        for row in range(5):
            part = slice(row, row + 1)
            own = Resident(
                resident.wanted_at[part], resident.asked[part], resident.unlikely[part], resident.phase[part]
            )
            assert torch.equal(replacement.ranks(own, ids[part], now[part]), together[part])
        if isinstance(replacement, Random):
            moments = [replacement.ranks(resident, ids, now + shift) for shift in range(4)]
            assert all(not torch.equal(one, other) for one, other in pairwise(moments))

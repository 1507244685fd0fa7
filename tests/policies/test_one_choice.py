"""Policies that decide now and then: SAGE-KV with a window chooses once, LazyEviction scores where it decides."""

from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache, ScoreContext
from hf_paged_eviction.policies.attention.lazy_eviction import LazyEviction
from hf_paged_eviction.table import victims

PROMPT = 40


def filled(policy: Any, steps: int, **settings: Any) -> tuple[PagedEvictionCache, list[Tensor]]:
    """Two rows, one of them padded; the positions of the first layer's first head after the prompt and each step."""
    model = models.shared("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=32, block_size=4, policy=policy, **settings)
    ids, mask = models.left_pad(models.prompts([PROMPT + steps, PROMPT + steps - 6]))
    held = []
    for start, stop in ((0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + steps))):
        modes.forward(model, cache, ids, mask, start, stop)
        held.append(cache.layers[0].positions[:, 0].clone())
    return cache, held


def test_what_sage_kv_chose_stays_and_the_rest_slides() -> None:
    _, held = filled("sage_kv(window=12)", 30)
    for row, length in enumerate((PROMPT, PROMPT - 6)):
        chosen = {p for p in held[0][row].tolist() if p < length - 12}
        assert 4 < len(chosen) < length - 12  # more than the sinks, and not all
        for step, positions in enumerate(held[1:], 1):
            now = set(positions[row].tolist())
            assert chosen <= now
            slides = sorted(now - chosen)
            # The newest, but for the part of the oldest block that is not overwritten yet.
            assert slides[-8:] == list(range(length + step - 8, length + step))
            assert slides[0] >= length + step - 16


def test_without_a_window_the_choice_is_never_final() -> None:
    _, held = filled("sage_kv", 30)
    before = {p for p in held[0][0].tolist() if p < PROMPT - 12}
    assert not before <= set(held[-1][0].tolist())


def test_heads_of_sage_kv_choose_apart_and_those_of_tova_together() -> None:
    for policy, apart in (("sage_kv", True), ("tova", False)):
        cache, _ = filled(policy, 0)
        choices = torch.cat([layer.positions.sort(-1).values for layer in cache.layers])
        assert bool((choices[:, 0] != choices[:, 1]).any()) == apart, policy


@pytest.mark.parametrize("static", [False, True])
def test_lazy_eviction_scores_where_it_decides(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = LazyEviction.score

    def counted(policy: LazyEviction, context: ScoreContext) -> Tensor:
        calls.append(context.layer_idx)
        return right(policy, context)

    monkeypatch.setattr(LazyEviction, "score", counted)
    runs = {}
    for lag, blocks in ((12, 3), (1, 1)):
        calls.clear()
        _, held = filled(LazyEviction(threshold=0.02, lag=lag), 25, static=static)
        runs[lag] = len(calls), held
        # Two layers, the overflow of the prompt, then a decision after every `blocks` of the 7 blocks.
        assert len(calls) <= 2 * (1 + -(-7 // blocks))
    assert runs[12][0] < runs[1][0]


def test_decisions_are_those_of_scoring_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = LazyEviction(threshold=0.02, lag=12)
    cache, held = filled(policy, 30, heads="separate")
    monkeypatch.setattr(victims, "decides", lambda table: True)
    _, always = filled(policy, 30, heads="separate")
    assert all(torch.equal(*pair) for pair in zip(held, always, strict=True))
    assert cache.stats().evicted_blocks > 6

"""Choosing victims and encoding are queued: the host reads nothing of a step, whatever is chosen.

Counted on a CPU, where each such read passes the dispatcher (or `no_lists`); on an accelerator each would be a wait.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import paged_eviction_attention
from policy_kinds import NAMES
from waiting import Watch, no_lists

CONFIG = models.family_config("llama", num_hidden_layers=1, attn_implementation="paged_eviction")
ROWS, BLOCK, BUDGET = 3, 4, 24


class Step(nn.Module):
    """The attention of a model with one layer, driven as transformers drives it."""

    layer_idx, is_causal, num_key_value_groups = 0, True, 2

    def __init__(self, cache: PagedEvictionCache, device: str = "cpu") -> None:
        super().__init__()
        self.cache, self.draw = cache, torch.Generator(device).manual_seed(0)

    def states(self, heads: int, count: int) -> Tensor:
        return torch.randn(ROWS, heads, count, 8, generator=self.draw, device=self.draw.device)

    def forward(self, count: int, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.states(4, count), self.states(2, count), self.states(2, count)
        held = self.cache.update(key, value, 0)
        return paged_eviction_attention(self, query, *held, mask, scaling=0.3)[0]


class StrictWatch(Watch):
    """Also notes numbers that would have to be carried to an accelerator."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.overloadpacket.__name__ == "lift_fresh":
            self.waiting.append("lift_fresh")
        return super().__torch_dispatch__(operator, types, args, kwargs)


def watched_steps(cache: PagedEvictionCache, steps: int = 3 * BLOCK) -> tuple[list[str], int]:
    """What the host waited for in decode steps behind a prompt that overflowed, and how many operators ran."""
    step = Step(cache)
    step(2 * BUDGET, torch.ones(2 * BUDGET, 2 * BUDGET, dtype=torch.bool).tril()[None, None])
    waited, operators = [], 0
    for _ in range(steps):
        with StrictWatch() as watch, no_lists():
            logits = step(1)
        assert logits.isfinite().all()
        waited += watch.waiting
        operators += sum(watch.operators.values())
    return waited, operators


WAYS: tuple[dict[str, Any], ...] = (
    {"disposal": "drop"},
    {"disposal": "drop", "bits": 4},
    {"disposal": "drop", "heads": "separate"},
    {"disposal": "drop", "positions": "cache"},
)
#: Every policy with some way, every way with many policies.
CASES = [(policy, WAYS[at % len(WAYS)]) for at, policy in enumerate(NAMES)]


@pytest.mark.parametrize(
    ("policy", "way"), CASES, ids=lambda case: case if isinstance(case, str) else " ".join(map(str, case.values()))
)
def test_no_step_waits(policy: str, way: dict[str, Any]) -> None:
    check_steps({**way, "policy": policy})


def check_steps(settings: dict[str, Any]) -> None:
    """No step of a cache that is full waits for anything."""
    sizes = {"budget": BUDGET, "block_size": BLOCK, "attention_mask": torch.ones(ROWS, 2 * BUDGET)}
    cache = PagedEvictionCache(CONFIG, **sizes, **settings)
    waited, operators = watched_steps(cache)
    assert operators > 0 and waited == []
    assert cache.stats().evicted_tokens == ROWS * (2 * BUDGET + 3 * BLOCK - BUDGET)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_step_waits_on_cuda(way: dict[str, Any]) -> None:
    check_steps_on_cuda({**way, "policy": "keydiff"})


def check_steps_on_cuda(settings: dict[str, Any]) -> None:
    """As `check_steps`, by what CUDA itself says."""
    sizes = {"budget": BUDGET, "block_size": BLOCK, "attention_mask": torch.ones(ROWS, 2 * BUDGET)}
    cache = PagedEvictionCache(CONFIG, **sizes, **settings)
    step = Step(cache, "cuda")
    step(2 * BUDGET, torch.ones(2 * BUDGET, 2 * BUDGET, dtype=torch.bool, device="cuda").tril()[None, None])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3 * BLOCK):
            step(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.stats().evicted_tokens > 0


def test_the_watch_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that looks at a number on the host, or brings one along, is found."""
    from hf_paged_eviction.policies.keys.keydiff import KeyDiff

    score = KeyDiff.score
    for spoiled in (lambda scores: scores * float(scores.max()), lambda scores: scores + torch.tensor([1.0])):
        monkeypatch.setattr(KeyDiff, "score", lambda self, context, spoil=spoiled: spoil(score(self, context)))
        cache = PagedEvictionCache(
            CONFIG, BUDGET, BLOCK, "keydiff", attention_mask=torch.ones(ROWS, 2 * BUDGET), disposal="drop"
        )
        assert watched_steps(cache)[0]

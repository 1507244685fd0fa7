"""When victims are chosen: at every block, or several together for a longer stretch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import models
import rows
from evicting import check
from hf_paged_eviction import EvictionPolicy, Needs, ScoreContext, make_policy
from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction.layer.parameters import Common, Place
from hf_paged_eviction.policies.attention.lazy_eviction import LazyEviction
from hf_paged_eviction.ranking import rank_keys
from hf_paged_eviction.table.budget import BlockBudget

BLOCK, BUDGET = 4, 32


def worth(positions: Tensor, seen: int) -> Tensor:
    """A score that changes with every token, so that it matters when it is asked for."""
    return ((positions * 7919 + seen * 104729) % 1009).float()


@dataclass(frozen=True)
class Restless(EvictionPolicy):
    """`worth`, asked for every `interval` tokens."""

    interval: int = 1

    @property
    def needs(self) -> Needs:
        return Needs(decision_interval=self.interval)

    def score(self, context: ScoreContext) -> Tensor:
        return worth(context.positions, int(context.seen[0]))


def simulated(tokens: int, together: int) -> list[set[int]]:
    """What is held after each token: blocks as lists of positions, the sink block first."""
    blocks = [list(range(start, start + BLOCK)) for start in range(0, BUDGET, BLOCK)]
    newest, chosen = len(blocks) - 1, list[int]()
    held = []
    for token in range(BUDGET, tokens):
        if (token - BUDGET) % BLOCK == 0:
            if not chosen:
                places = torch.tensor([blocks])
                ranks = rank_keys(worth(places, token).mean(-1), places[..., 0], places[..., 0] >= 0)[0].tolist()
                free = [at for at in range(1, len(blocks)) if at != newest]
                chosen = sorted(free, key=lambda at: ranks[at])[: max(1, min(together, len(free) // 2))]
            newest = chosen.pop(0)
        blocks[newest][(token - BUDGET) % BLOCK] = token
        held.append({position for block in blocks for position in block})
    return held


@pytest.mark.parametrize(
    ("interval", "together"), [(1, 1), (3, 1), (4, 1), (8, 2), (11, 2), (12, 3), (16, 3), (1000, 3)]
)
def test_victims_are_chosen_together(interval: int, together: int) -> None:
    layer = PagedLayer(BlockBudget.validate(BUDGET, BLOCK, None), Common(Restless(interval)), Place())
    held = []
    for token in range(100):
        layer.update(torch.randn(1, 1, 1, 2), torch.randn(1, 1, 1, 2))
        if token >= BUDGET:
            held.append(set(layer.positions[0, 0].tolist()))
    assert held == simulated(100, together)


def test_it_matters_when() -> None:
    assert simulated(100, 1) != simulated(100, 3)


@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "direct", "two_turns", "prompt_lookup"])
def test_exact(mode: str, heads: str) -> None:
    check("llama", "paged_eviction", mode, True, policy="lazy_eviction(lag=8)", heads=heads, budget=32)


def test_rows_do_not_depend_on_their_batch() -> None:
    model = models.shared("llama", "paged_eviction")
    settings = {"budget": 32, "block_size": 4, "policy": LazyEviction(lag=8)}
    assert rows.compare(model, [40, 33, 9, 1], [10, 2, 6, 3], **settings) > 0


def test_policies_say_when() -> None:
    assert make_policy("lazy_eviction(lag=48)").needs.decision_interval == 48
    assert make_policy("hybrid(lazy_eviction, h2o)").needs.decision_interval == 32
    assert make_policy("h2o").needs.decision_interval == 1

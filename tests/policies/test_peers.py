"""The tokens that policies and allocators keep are those that their authors' code keeps.

`tests/data/peers` holds what other systems kept of the prompt in `kept.json` on the embedded model: 160 of 640 tokens
per layer and KV head, or what they share out. Each file names source, commit and settings; a set is a hexadecimal
number in which bit `t` stands for token `t`. None of their code is needed here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import BudgetAllocator
from hf_paged_eviction.allocators.ada_kv import AdaKV
from hf_paged_eviction.allocators.cake import Cake
from hf_paged_eviction.allocators.pyramid import Pyramid
from hf_paged_eviction.attention.weights import Attention
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.policies.attention.snapkv import SnapKV
from hf_paged_eviction.policies.attention.window_attention import over_group
from hf_paged_eviction.policies.modifiers.vase import Vase
from hf_paged_eviction.recipes.procedures.probe import compress_by_probe
from hf_paged_eviction_eval import embedded

PEERS = Path(__file__).parents[1] / "data" / "peers"
ALLOCATORS: dict[str, BudgetAllocator | str] = {
    "": "uniform",
    "ada_kv": AdaKV(),
    "ada_kv(floor=0)": AdaKV(floor=0.0),
    "ada_kv(floor=0.5)": AdaKV(floor=0.5),
    "cake": Cake(),
    "cake(tau1=1.6, tau2=0.4)": Cake(tau1=1.6, tau2=0.4),
    "d2o": "d2o",
    "pyramid": Pyramid(),
}
BUDGET, LENGTH = 160, 640
LEAST = 0.98

#: Layer -> KV head -> tokens.
Kept = list[list[set[int]]]


@cache
def peer(system: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((PEERS / f"{system}.json").read_text("utf-8"))
    return content


@cache
def model() -> Any:
    return embedded.load(attn_implementation="paged_eviction")[0]


def kept_by_peer(system: str, name: str) -> Kept:
    sets = peer(system)["kept"][name]
    return [[{t for t in range(LENGTH) if int(head, 16) >> t & 1} for head in layer] for layer in sets]


def empty(name: str, budget: int, sinks: int = 0) -> PagedEvictionCache:
    """A cache without protection of its own but for the sinks that the other system has."""
    policy, _, allocator = name.partition("@")
    settings: dict[str, Any] = {"policy": policy, "heads": "separate", "allocator": ALLOCATORS[allocator]}
    return PagedEvictionCache(model().config, budget=budget, block_size=1, sink_tokens=sinks, **settings)


def held(cache: PagedEvictionCache) -> Kept:
    return [[set(head) - {-1} for head in layer.positions[0].tolist()] for _, layer in cache.paged_layers]


def assert_same(ours: Kept, reference: Kept) -> None:
    """Allocators may round a share up where the others round down."""
    for layer, (mine, other) in enumerate(zip(ours, reference, strict=True)):
        for head, (tokens, expected) in enumerate(zip(mine, other, strict=True)):
            assert abs(len(tokens) - len(expected)) <= 1, (layer, head, len(tokens), len(expected))
            share = len(tokens & expected) / min(len(tokens), len(expected))
            assert share >= LEAST, (layer, head, share)


@pytest.mark.parametrize(
    ("system", "name"),
    [(system, name) for system in ("kvcache_factory", "ada_kv", "r_kv", "cake") for name in peer(system)["kept"]],
)
def test_kept_tokens(system: str, name: str) -> None:
    cache = empty(name, BUDGET)
    with torch.no_grad():
        model()(torch.tensor([peer("kept")["input_ids"]]), **{CACHE_ARGUMENT: cache})
    assert_same(held(cache), kept_by_peer(system, name))


@dataclass(frozen=True)
class AmongOlder(SnapKV):
    """SnapKV as VaSE's code has it: the tokens of the window take no part in the softmax."""

    def summed(self, attention: Attention, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        older = attention.key_positions < LENGTH - self.window
        weights = attention.weights * older[:, :, None, None]
        return {"": over_group(weights / weights.sum(-1, keepdim=True).clamp_min(1e-20), chosen)}


@pytest.mark.parametrize("kernel", [1, 5])
def test_kept_tokens_of_vase(kernel: int) -> None:
    """In the place of chance stands the largest, there and here."""
    policy = Vase(AmongOlder(window=32, kernel=kernel), stochastic=False)
    cache = PagedEvictionCache(
        model().config, budget=BUDGET, policy=policy, heads="separate", block_size=1, sink_tokens=0
    )
    with torch.no_grad():
        model()(torch.tensor([peer("kept")["input_ids"]]), **{CACHE_ARGUMENT: cache})
    assert_same(held(cache), kept_by_peer("vase", f"kernel {kernel}"))


def test_kept_tokens_of_lagkv() -> None:
    """Of 16 sinks and nine partitions of 64 all but the last leave 16 tokens each; so 256 stay."""
    (name,) = peer("lagkv")["kept"]
    cache = empty(name, 256)
    with torch.no_grad():
        model()(torch.tensor([peer("kept")["input_ids"]]), **{CACHE_ARGUMENT: cache})
    assert_same(held(cache), kept_by_peer("lagkv", name))


@pytest.mark.parametrize("name", peer("kvzip")["kept"])
def test_kept_tokens_of_kvzip(name: str) -> None:
    cache, ids = empty(name, LENGTH, sinks=4), torch.tensor([peer("kept")["input_ids"]])
    compress_by_probe(model(), cache, BUDGET, ids, probe_ids=peer("kvzip")["probe_ids"])
    assert_same(held(cache), kept_by_peer("kvzip", name))


def test_shares_of_d2o() -> None:
    cache = empty("recency@d2o", BUDGET)
    with torch.no_grad():
        model()(torch.tensor([peer("kept")["input_ids"]]), **{CACHE_ARGUMENT: cache})
    for mine, ratio in zip(held(cache), peer("d2o")["ratios"], strict=True):
        assert all(abs(len(tokens) - ratio * LENGTH) < 1 for tokens in mine)

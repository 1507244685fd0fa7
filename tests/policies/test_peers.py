"""The tokens that policies and allocators keep are those that their authors' code keeps.

`tests/data/peers` holds what other systems kept of the prompt in `kept.json` on the embedded model: 160 of 640 tokens
per layer and KV head, or what they share out. Each file names source, commit and settings; a set is a hexadecimal
number in which bit `t` stands for token `t`, or a list in `kept.json`, which `benchmarks/peers.py` makes with kvpress
0.5.5 and transformers 5.2.0. kvpress has no protected blocks: there are none here but the newest token, or the newest
32 where a press keeps these itself. None of their code is needed here.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from hf_paged_eviction import EvictionPolicy, PagedEvictionCache
from hf_paged_eviction.allocators import BudgetAllocator
from hf_paged_eviction.allocators.ada_kv import AdaKV
from hf_paged_eviction.allocators.cake import Cake
from hf_paged_eviction.allocators.pyramid import Pyramid
from hf_paged_eviction.attention.weights import Attention
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.policies import Statistics
from hf_paged_eviction.policies.attention.compactor import Compactor
from hf_paged_eviction.policies.attention.snapkv import SnapKV
from hf_paged_eviction.policies.attention.window_attention import over_group
from hf_paged_eviction.policies.modifiers.vase import Vase
from hf_paged_eviction.recipes.probe import compress_by_probe
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


def empty(name: str | EvictionPolicy, budget: int, sinks: int = 0, newest: int = 1) -> PagedEvictionCache:
    """A cache without protection of its own but for the sinks, and the newest tokens, that the other system has."""
    policy, _, allocator = name.partition("@") if isinstance(name, str) else (name, "", "")
    settings: dict[str, Any] = {"policy": policy, "heads": "separate", "allocator": ALLOCATORS[allocator]}
    return PagedEvictionCache(model().config, budget, block_size=newest, sink_tokens=sinks, **settings)


def read(cache: PagedEvictionCache) -> Kept:
    """What is held of the prompt."""
    with torch.no_grad():
        model()(torch.tensor([peer("kept")["input_ids"]]), **{CACHE_ARGUMENT: cache})
    return held(cache)


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
    assert_same(read(empty(name, BUDGET)), kept_by_peer(system, name))


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
    assert_same(read(empty(policy, BUDGET)), kept_by_peer("vase", f"kernel {kernel}"))


def test_kept_tokens_of_lagkv() -> None:
    """Of 16 sinks and nine partitions of 64 all but the last leave 16 tokens each; so 256 stay."""
    (name,) = peer("lagkv")["kept"]
    assert_same(read(empty(name, 256)), kept_by_peer("lagkv", name))


@pytest.mark.parametrize("name", peer("kvzip")["kept"])
def test_kept_tokens_of_kvzip(name: str) -> None:
    cache, ids = empty(name, LENGTH, sinks=4), torch.tensor([peer("kept")["input_ids"]])
    compress_by_probe(model(), cache, BUDGET, ids, probe_ids=peer("kvzip")["probe_ids"])
    assert_same(held(cache), kept_by_peer("kvzip", name))


def test_shares_of_d2o() -> None:
    for mine, ratio in zip(read(empty("recency@d2o", BUDGET)), peer("d2o")["ratios"], strict=True):
        assert all(abs(len(tokens) - ratio * LENGTH) < 1 for tokens in mine)


@dataclass(frozen=True)
class WithBlanks(Compactor):
    """Compactor as kvpress 0.5.5 computes it where the last chunk is not full.

    It fills the chunk up with blank queries and keys, whose logits are 0 instead of minus infinity: blank keys take a
    share of each query's attention, and blank queries give each key the same. The authors' engine has no blanks.
    """

    def observe(self, statistics: Statistics, attention: Attention) -> Statistics:
        received = super().observe(statistics, attention)["received"]
        last = LENGTH - self.n_recent - (LENGTH - self.n_recent - self.n_sink) % self.chunk
        part = slice(last, LENGTH - self.n_recent)
        blanks = self.chunk - (part.stop - part.start)
        keys = attention.keys[:, :, None, part]
        queries = attention.queries[:, :, part].unflatten(1, (keys.shape[1], -1))
        weights = pad(queries @ keys.mT, (0, blanks)).softmax(-1)[..., :-blanks]
        received[:, :, part] = weights.mean(2).sum(2) + blanks / self.chunk
        return {"received": received}


#: press, policy that does the same, newest tokens that the press keeps whatever they score
SAME: list[tuple[str, str | EvictionPolicy, int]] = [
    ("KnormPress", "key_norm", 1),
    ("KeyDiffPress", "keydiff", 1),
    ("SnapKVPress(window_size=32, kernel_size=5)", "snapkv(window=32, kernel=5)", 32),
    ("TOVAPress", "tova", 1),
    ("LagKVPress(n_sink=4, lag_size=64)", "lagkv(lag=64, n_sink=4)", 1),
    ("ObservedAttentionPress", "attention_mean", 1),
    ("StreamingLLMPress(n_sink=4)", "streaming_llm(n_sink=4)", 1),
    ("ExpectedAttentionPress", "expected_attention", 1),
    (
        "ExpectedAttentionPress(use_covariance=False, use_vnorm=False)",
        "expected_attention(covariance=False, value_norm=False)",
        1,
    ),
    # Both weigh leverage by the share that is evicted.
    ("CompactorPress(chunk_size=157)", "compactor(chunk=157)", 1),
    ("CompactorPress", WithBlanks(), 1),
]


def agreement(press: str, policy: str | EvictionPolicy, newest: int = 1) -> list[float]:
    """Per layer, the share of the tokens kept by kvpress that are kept here, mean of the KV heads."""
    shares = []
    for mine, other in zip(read(empty(policy, BUDGET, newest=newest)), peer("kept")["kept"][press], strict=True):
        assert {len(set(head)) for head in (*mine, *other)} == {BUDGET}
        both = [len(ours & set(theirs)) for ours, theirs in zip(mine, other, strict=True)]
        shares.append(sum(both) / BUDGET / len(both))
    return shares


def test_the_file_is_of_this_model() -> None:
    weights = Path(embedded.__file__).parent / "model" / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == peer("kept")["model_sha256"]
    assert {press for press, _, _ in SAME} == set(peer("kept")["kept"])


@pytest.mark.parametrize(("press", "policy", "newest"), SAME, ids=[press for press, _, _ in SAME])
def test_kept_tokens_of_kvpress(press: str, policy: str | EvictionPolicy, newest: int) -> None:
    """Compactor's sketch is random in kvpress; it spans more than the 32 channels of a head, so it changes little."""
    assert min(agreement(press, policy, newest)) >= LEAST


def test_other_policies_keep_other_tokens() -> None:
    """Otherwise the comparison would show nothing."""
    assert min(agreement("ExpectedAttentionPress", "attention_mean")) < 0.8
    assert min(agreement("LagKVPress(n_sink=4, lag_size=64)", "lagkv(lag=16, n_sink=0, scope=all)")) < 0.5
    assert min(agreement("CompactorPress(chunk_size=157)", "leverage")) < 0.6

"""Policies keep the tokens that kvpress keeps, on one prompt of the embedded model.

`data/peers/kept.json` is made by `benchmarks/peers.py` with kvpress 0.5.5 and transformers 5.2.0: for each press, layer
and KV head the 160 of 640 tokens that it keeps. Differences between the two are settings, and stand here: kvpress has
no protected blocks, so there are none but the newest token, or the newest 32 where the press keeps these itself.
"""

from __future__ import annotations

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
from hf_paged_eviction.attention.weights import Attention
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.policies import Statistics
from hf_paged_eviction.policies.attention.compactor import Compactor
from hf_paged_eviction_eval import embedded

PEERS = json.loads((Path(__file__).parents[1] / "data" / "peers" / "kept.json").read_text())
BUDGET = PEERS["kept_per_layer_and_head"]
LENGTH = len(PEERS["input_ids"])


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


@cache
def model() -> Any:
    loaded, _ = embedded.load()
    loaded.set_attn_implementation("paged_eviction")
    return loaded


def agreement(press: str, policy: str | EvictionPolicy, newest: int = 1) -> list[float]:
    """Per layer, the share of the tokens kept by kvpress that are kept here, mean of the KV heads."""
    held = PagedEvictionCache(
        model().config, budget=BUDGET, block_size=newest, sink_tokens=0, heads="separate", policy=policy
    )
    with torch.no_grad():
        model()(torch.tensor([PEERS["input_ids"]]), **{CACHE_ARGUMENT: held})
    shares = []
    for (_, layer), peer in zip(held.paged_layers, PEERS["kept"][press], strict=True):
        ours = layer.positions[0].tolist()
        assert {len(set(head)) for head in (*ours, *peer)} == {BUDGET}
        both = [len(set(mine) & set(other)) for mine, other in zip(ours, peer, strict=True)]
        shares.append(sum(both) / BUDGET / len(both))
    return shares


def test_the_file_is_of_this_model() -> None:
    weights = Path(embedded.__file__).parent / "model" / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == PEERS["model_sha256"]
    assert {press for press, _, _ in SAME} == set(PEERS["kept"])


@pytest.mark.parametrize(("press", "policy", "newest"), SAME, ids=[press for press, _, _ in SAME])
def test_the_same_tokens_are_kept(press: str, policy: str | EvictionPolicy, newest: int) -> None:
    """Compactor's sketch is random in kvpress; it spans more than the 32 channels of a head, so it changes little."""
    shares = agreement(press, policy, newest)
    assert min(shares) >= 0.98, shares


def test_other_policies_keep_other_tokens() -> None:
    """Otherwise the comparison would show nothing."""
    assert min(agreement("ExpectedAttentionPress", "attention_mean")) < 0.8
    assert min(agreement("LagKVPress(n_sink=4, lag_size=64)", "lagkv(lag=16, n_sink=0, scope=all)")) < 0.5
    assert min(agreement("CompactorPress(chunk_size=157)", "leverage")) < 0.6

"""What the papers say of their policies."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_paged_eviction import EvictionPolicy, ScoreContext, make_policy
from hf_paged_eviction.attention.weights import Attention, Logits
from hf_paged_eviction.policies import QueryCount
from hf_paged_eviction.policies.attention.h2o import H2O
from hf_paged_eviction.policies.attention.lazy_eviction import LazyEviction
from hf_paged_eviction.policies.attention.snapkv import SnapKV
from hf_paged_eviction.policies.attention_policy import AttentionPolicy
from hf_paged_eviction.policies.heads import mean_over_heads
from hf_paged_eviction.policies.keys.recency import Recency
from hf_paged_eviction.policies.keys.streaming_llm import StreamingLLM
from hf_paged_eviction.policies.modifiers.adaptive import Adaptive
from hf_paged_eviction.policies.modifiers.graphkv import GraphKV
from hf_paged_eviction.policies.modifiers.hybrid import Hybrid
from hf_paged_eviction.tensors.pieces import PIECE_BYTES
from policy_inputs import text


def context_of(keys: Tensor, values: Tensor | None = None, **statistics: Tensor) -> ScoreContext:
    """One row and head; `keys` `[tokens, dim]`, statistics `[tokens]`."""
    values = keys if values is None else values
    positions = torch.arange(len(keys))[None, None]
    per_head = {name: numbers[None, None] for name, numbers in statistics.items()}
    seen, none = torch.tensor([len(keys)]), torch.tensor([0])
    observed = QueryCount(seen, none, none)
    return ScoreContext(keys[None, None], values[None, None], positions, seen, 0, per_head, observed=observed)


def attention_of(weights: Tensor) -> Attention:
    """One row and head with exactly these weights `[q, tokens]`; the queries are the newest tokens."""
    count, tokens = weights.shape
    logits = weights.clamp_min(1e-30).log()
    positions = torch.arange(tokens)
    return Attention(
        logits[None, None], torch.eye(tokens)[None, None], positions[None, -count:], positions[None, None], Logits(1.0)
    )


class Given(AttentionPolicy):
    """Attention from a table by position."""

    def __init__(self, table: list[float]) -> None:
        self.table = torch.tensor(table)

    def attention(self, context: ScoreContext) -> Tensor:
        return self.table[context.positions.clamp_min(0)]


def test_h2o_pins_the_newest_half_of_the_budget() -> None:
    """A share of what the layer may hold, which allocators may decide row by row; of nothing known, nothing."""
    context = context_of(torch.ones(12, 2), attention=torch.arange(12.0))
    assert H2O().score(context).isfinite().all()
    for budget in (6, torch.tensor([[[7]]])):
        assert H2O().score(replace(context, budget=budget))[0, 0].isposinf().tolist() == [False] * 9 + [True] * 3
    assert H2O(recent=1).score(replace(context, budget=5)).isposinf().sum() == 5


def test_mean_over_heads_goes_by_token() -> None:
    values = torch.tensor([[[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]])
    positions = torch.tensor([[[4, 7, 9], [9, 4, 2]]])
    expected = torch.tensor([[[(1 + 20) / 2, 2, (3 + 10) / 2], [(3 + 10) / 2, (1 + 20) / 2, 30]]])

    def mean(positions: Tensor) -> Tensor:
        states = torch.zeros(1, 2, 3, 1)
        return mean_over_heads(values, ScoreContext(states, states, positions, torch.tensor([10]), 0))

    torch.testing.assert_close(mean(positions), expected)
    shared = torch.tensor([[[4, 7, 9]]]).expand(-1, 2, -1)
    torch.testing.assert_close(mean(shared), values.mean(1, keepdim=True).expand(-1, 2, -1))
    torch.testing.assert_close(mean(shared.contiguous()), mean(shared))


@pytest.mark.parametrize("fed", [[16, 4, 4, 4, 4], [10, 2, 1, 6, 3, 8, 2], [5, 27]], ids=str)
def test_the_window_slides_on(fed: list[int]) -> None:
    """It always weighs a full window, exactly so after a prompt, whatever the pieces in between."""
    inputs = text(rows=2, heads=1, tokens=sum(fed), seed=4)
    policy = SnapKV(window=8, kernel=1)
    pieces, start = [], 0
    for count in fed:
        pieces.append(list(range(start, start + count)))
        start += count
    context = inputs.context(policy, pieces)
    statistics = context.statistics
    assert (statistics["newest"] == context.seen - 1).all()
    # Spans of eight positions; the older one counts as far as a window is missing.
    weights = inputs.attention(range(start)).weights.mean(2)
    query = inputs.query_positions[:, :, None]
    span, newest = query // 8, (context.seen - 1)[:, None, None] // 8
    filled = (context.seen - 1)[:, None, None] % 8 + 1
    share = torch.where(span == newest, 1.0, torch.where(span == newest - 1, (8 - filled) / 8, 0.0)) * (query >= 0)
    expected = (weights * share[:, None]).sum(2)
    later = (context.seen[:, None, None] - context.positions).clamp(1, 8)
    torch.testing.assert_close((policy.attention(context) * later)[context.valid], expected[context.valid])


def test_the_window_of_a_prompt_is_exact_after_another_forward() -> None:
    """Of a second prompt the cache shows its last queries, and those of the first are forgotten."""
    inputs = text(rows=2, heads=2, tokens=40, seed=5)
    policy = SnapKV(window=6)
    twice = inputs.context(policy, [list(range(10, 16)), list(range(34, 37)), list(range(37, 40))])
    once = inputs.context(policy, [list(range(34, 40))])
    torch.testing.assert_close(policy.score(twice)[twice.valid], policy.score(once)[once.valid])


def test_pauses_are_measured_across_pieces() -> None:
    weights = torch.full((9, 10), 0.0)
    weights[:, 1:] = 1 / 9
    weights[[0, 1, 6], 0] = 1.0
    policy = LazyEviction(threshold=0.01, lag=0)
    whole = attention_of(weights)
    statistics = {name: torch.zeros(1, 1, 10) for name in policy.needs.token_statistics}
    for part in ([0], [1, 2, 3], [6, 4, 5], [8, 7]):
        piece = replace(whole, queries=whole.queries[:, :, part], query_positions=whole.query_positions[:, part])
        statistics = policy.observe(statistics, piece)
    assert statistics["pause"][0, 0, 0] == 5
    assert statistics["active"][0, 0, 0] == 8


@pytest.mark.parametrize("name", ["lra", "lfa"])
def test_even_attention_attends_to_nothing(name: str) -> None:
    """More than an even share is asked for, and rounding is not more."""
    policy = make_policy(name)
    for tokens in (3, 7, 11, 49):
        even = torch.ones(tokens, tokens).tril() / torch.arange(1, tokens + 1)[:, None]
        statistics = {key: torch.zeros(1, 1, tokens) for key in policy.needs.token_statistics}
        statistics = policy.observe(statistics, attention_of(even))
        assert (statistics["used" if name == "lra" else "uses"] == 0).all()


def test_redundancy_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is compared with itself piece by piece."""
    inputs = text(tokens=23)
    policies = [make_policy("r_kv(balance=0.0)"), make_policy("graphkv(recency, sources=0.7)")]
    whole = [policy.score(inputs.context(policy, inputs.all_pieces(policy))) for policy in policies]
    monkeypatch.setitem(PIECE_BYTES, "cpu", 4 * 3 * 2 * 23 * 5)
    parts = [policy.score(inputs.context(policy, inputs.all_pieces(policy))) for policy in policies]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def test_graphkv_of_equal_keys_keeps_the_best() -> None:
    """All the same: each source is a copy of the best, and something is left of every score."""
    host = Given([0.5, 0.25, 0.125, 1.0, 0.75, 0.0])
    scores = GraphKV(host, sources=1.0, neighbours=5).score(context_of(torch.ones(6, 4)))[0, 0]
    assert scores.argmax() == 3
    assert scores[3] == 1.0
    assert (scores[:5] > 0).all()
    assert scores.isfinite().all()


def test_graphkv_of_negative_scores_lowers_too() -> None:
    """Key norms are negative; multiplied by a factor below one they would rise."""
    torch.manual_seed(2)
    keys = torch.randn(16, 4)
    context = context_of(keys)
    host = make_policy("key_norm").score(context)[0, 0]
    scores = GraphKV(make_policy("key_norm")).score(context)[0, 0]
    assert (scores <= host - host.min() + 1e-6).all()
    assert scores.min() == 0


def test_pins_stay_pinned() -> None:
    context = context_of(torch.randn(12, 4))
    for policy in (GraphKV(StreamingLLM(n_sink=2)), Hybrid(Recency(), StreamingLLM(n_sink=2))):
        assert policy.score(context)[0, 0].isposinf().nonzero()[:, 0].tolist() == [0, 1]
        assert not policy.score(context).isnan().any()


def test_hybrid_drops_what_one_puts_below_everything() -> None:
    class Lowest(EvictionPolicy):
        def score(self, context: ScoreContext) -> Tensor:
            scores = context.positions.float()
            return scores.masked_fill(context.positions == 3, float("-inf")).masked_fill(
                context.positions == 0, math.inf
            )

    class Pins(EvictionPolicy):
        def score(self, context: ScoreContext) -> Tensor:
            return torch.zeros(context.positions.shape).masked_fill(context.positions == 3, math.inf)

    inputs = context_of(torch.ones(6, 2))
    scores = Hybrid(Lowest(), Recency()).score(inputs)[0, 0]
    assert scores[0] == math.inf
    assert scores[3] == -math.inf
    assert Hybrid(Lowest(), Pins()).score(inputs)[0, 0, 3] == math.inf


def test_adaptive_follows_entropy() -> None:
    """Each row for itself, and back again."""
    tokens = 16
    sharp = torch.full((8, tokens), 1e-9)
    sharp[:, 2] = 1.0
    even = torch.full((8, tokens), 1.0)
    policy = Adaptive(Given([1.0] * tokens), Recency(), threshold=0.5, horizon=4)
    context = context_of(torch.ones(tokens, 2))
    expected = {True: torch.ones(tokens), False: torch.arange(tokens).float()}
    statistics: dict[str, Tensor] = {}
    assert torch.equal(policy.score(context)[0, 0], expected[False])
    first = replace(attention_of(sharp), query_positions=torch.arange(8)[None])
    statistics = policy.observe(statistics, first)
    assert torch.equal(policy.score(replace(context, statistics=statistics))[0, 0], expected[True])
    statistics = policy.observe(statistics, attention_of(even))
    assert torch.equal(policy.score(replace(context, statistics=statistics))[0, 0], expected[False])

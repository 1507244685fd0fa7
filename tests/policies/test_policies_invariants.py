"""What the papers say of their policies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_paged_eviction import EvictionPolicy, ScoreContext, make_policy
from hf_paged_eviction.attention.weights import Attention, Logits
from hf_paged_eviction.policies import (
    H2O,
    RKV,
    Adaptive,
    Caote,
    GraphKV,
    Hybrid,
    LagKV,
    LazyEviction,
    Leverage,
    QueryCount,
    Recency,
    RoCo,
    SnapKV,
    StreamingLLM,
)
from hf_paged_eviction.policies.attention_policy import AttentionPolicy
from hf_paged_eviction.policies.heads import mean_over_heads
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


# ---- attention ------------------------------------------------------------------------------------------------------


def test_raw_h2o_is_the_column_sum_and_favours_the_old() -> None:
    """With even attention early tokens get more in sum, and the same per opportunity."""
    tokens = 12
    even = torch.ones(tokens, tokens).tril() / torch.arange(1, tokens + 1)[:, None]
    states = torch.ones(tokens, 2)
    raw, fair = H2O(recent=0), H2O(normalised=True, recent=0)
    zero = {name: torch.zeros(1, 1, tokens) for name in raw.needs.token_statistics}
    seen = raw.observe(zero, attention_of(even))
    context = replace(context_of(states), statistics=seen)
    torch.testing.assert_close(raw.score(context)[0, 0], even.sum(0))
    assert (raw.score(context)[0, 0].diff() < 0).all()
    torch.testing.assert_close(fair.score(context)[0, 0], even.sum(0) / torch.arange(tokens, 0, -1))


def test_h2o_pins_the_newest_half_of_the_budget() -> None:
    """A share of what the layer may hold, which allocators may decide row by row; of nothing known, nothing."""
    context = context_of(torch.ones(12, 2), attention=torch.arange(12.0))
    assert H2O().score(context).isfinite().all()
    for budget in (6, torch.tensor([[[7]]])):
        assert H2O().score(replace(context, budget=budget))[0, 0].isposinf().tolist() == [False] * 9 + [True] * 3
    assert H2O(recent=1).score(replace(context, budget=5)).isposinf().sum() == 5


def test_tova_is_one_set_for_all_heads() -> None:
    inputs, policy = text(seed=1), make_policy("tova")
    scores = policy.score(inputs.context(policy, inputs.all_pieces(policy)))
    torch.testing.assert_close(scores[:, 0], scores[:, 1])
    alone = make_policy("sage_kv")
    scores = alone.score(inputs.context(alone, inputs.all_pieces(alone)))
    assert not torch.allclose(scores[:, 0], scores[:, 1])


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


def test_roco_spares_what_varies() -> None:
    """Tokens 1 and 4 get least on average, but one of them at times a lot."""
    attention = torch.tensor([0.3, 0.02, 0.2, 0.2, 0.02, 0.26]) * 4
    squares = attention.square() / 4 + torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0])
    context = context_of(torch.ones(6, 2), attention=attention, squares=squares)
    context = replace(context, observed=QueryCount(context.seen, context.seen, torch.tensor([4])))
    order = RoCo(safe=0.2).score(context)[0, 0].argsort()
    assert order[0] == 4
    assert order[-1] == 1
    unspared = RoCo(safe=0.0).score(context)[0, 0]
    assert unspared[1] == unspared[4] == unspared.min()


def test_snapkv_keeps_clusters_together() -> None:
    """Pooling lifts the neighbour of a token that is attended to, in the text and not in the slots."""
    inputs = text(rows=1, heads=1, tokens=30, seed=3)
    policy = SnapKV(window=4, kernel=3, pooling="max")
    context = inputs.context(policy, inputs.all_pieces(policy))
    plain = replace(policy, kernel=1).attention(context)[0, 0]
    pooled = policy.attention(context)[0, 0]
    best = int(plain[:26].argmax())
    for neighbour in {max(best - 1, 0), min(best + 1, 25)}:
        assert pooled[neighbour] == plain[best]
    torch.testing.assert_close(pooled[26:], plain[26:])
    assert policy.score(context)[0, 0].isposinf().tolist() == [False] * 26 + [True] * 4


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


# ---- attention as yes or no -----------------------------------------------------------------------------------------


def test_what_recurs_outlives_what_does_not() -> None:
    """Of two tokens last active at the same time the one with long pauses may still return."""
    active = torch.tensor([20.0, 20.0, 20.0, 0.0, *[0.0] * 26])
    pause = torch.tensor([12.0, 2.0, 0.0, 0.0, *[0.0] * 26])
    context = context_of(torch.ones(30, 2), active=active, pause=pause)
    scores = LazyEviction(lag=4).score(context)[0, 0]
    assert scores[0] > scores[1] > scores[2] == scores[3] == 0
    assert scores[-4:].isposinf().all()
    assert scores[:-4].isfinite().all()
    # However large the lag, half of what is held can be judged.
    assert LazyEviction(lag=1000).score(context)[0, 0].isfinite().sum() == 15


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


# ---- keys and values ------------------------------------------------------------------------------------------------


def test_the_latest_of_several_copies_survives() -> None:
    """Copies of one key score higher the later they come, the last two aside, which spare each other."""
    torch.manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(12, 32), dim=-1) * 4
    keys[[2, 5, 8, 11]] = keys[2].clone()
    context = context_of(keys, **{name: torch.zeros(12) for name in RKV().needs.token_statistics})
    scores = RKV(balance=0.0).score(context)[0, 0]
    assert scores[11] >= scores[8] > scores[5]
    assert scores[11] > scores[2]
    others = [t for t in range(12) if t not in (2, 5, 8, 11)]
    assert scores[[2, 5]].max() < scores[others].min(), "what is there again later goes before what is there once"


def test_redundancy_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is compared with itself piece by piece."""
    inputs = text(tokens=23)
    policies = [make_policy("r_kv(balance=0.0)"), make_policy("graphkv(recency, sources=0.7)")]
    whole = [policy.score(inputs.context(policy, inputs.all_pieces(policy))) for policy in policies]
    monkeypatch.setattr("hf_paged_eviction.policies.redundancy._PIECE", 4 * 3 * 2 * 23 * 5)
    parts = [policy.score(inputs.context(policy, inputs.all_pieces(policy))) for policy in policies]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def test_graphkv_lowers_and_never_deletes() -> None:
    torch.manual_seed(1)
    keys = torch.randn(20, 8)
    keys[5] = keys[15]  # a copy of a better token
    host = Given([1.0 + t for t in range(20)])
    context = context_of(keys)
    scores, before = GraphKV(host, sources=0.5, neighbours=3).score(context)[0, 0], host.score(context)[0, 0]
    assert (scores <= before).all()
    assert (scores > 0).all()
    assert scores[5] < 0.05 * before[5]
    assert scores[19] == before[19], "nothing is better than the best"
    assert torch.equal(GraphKV(host, sources=0.0).score(context)[0, 0], before)


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


def test_lagkv_does_not_care_for_the_scale_of_a_channel() -> None:
    torch.manual_seed(3)
    keys, values = torch.randn(24, 6), torch.randn(24, 5)
    policy = LagKV(lag=8, n_sink=0, scope="all")
    scores = policy.score(context_of(keys, values))
    stretched = policy.score(context_of(keys * torch.arange(1, 7) + 3, values * 0.01))
    torch.testing.assert_close(scores, stretched, rtol=1e-4, atol=1e-4)
    assert scores[0, 0].isposinf().nonzero()[:, 0].tolist() == list(range(16, 24))
    constant = policy.score(context_of(torch.ones(24, 6), torch.zeros(24, 5)))
    assert (constant[0, 0, :16] == 0).all()


def test_leverage_does_not_care_for_a_linear_code_and_finds_the_odd_one() -> None:
    torch.manual_seed(4)
    keys = torch.randn(40, 5)
    code = torch.linalg.qr(torch.randn(5, 5)).Q * 7
    policy = Leverage(ridge=1e-5)
    scores = policy.score(context_of(keys))
    torch.testing.assert_close(scores, policy.score(context_of(keys @ code)), rtol=1e-3, atol=1e-4)
    assert scores.sum().item() == pytest.approx(5, rel=1e-3), "leverages sum to the rank"
    common = torch.randn(20, 2) @ torch.randn(2, 5)
    common[7] = torch.randn(5)
    assert Leverage(ridge=1e-4).score(context_of(common))[0, 0].argmax() == 7
    assert (Leverage().score(context_of(torch.zeros(4, 5))) == 0).all()


def test_caote_of_even_attention_is_the_distance_to_the_mean_value() -> None:
    torch.manual_seed(5)
    values = torch.randn(10, 4)
    scores = Caote(Given([3.0] * 10)).score(context_of(values, values))[0, 0]
    torch.testing.assert_close(scores, (values - values.mean(0)).norm(dim=-1) / 9)


def test_caote_lets_go_what_changes_nothing() -> None:
    """Much attention to a value that is the output itself is worth less than a little to another."""
    values = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-4.0, 3.0]])
    scores = Caote(Given([0.4, 0.4, 0.15, 0.05])).score(context_of(values, values))[0, 0]
    assert scores.argmax() == 3
    alone = Caote(Given([1.0, 0.0, 0.0, 0.0])).score(context_of(values, values))[0, 0]
    assert alone.isfinite().all()
    assert Caote(Given([0.0] * 4)).score(context_of(values, values)).isfinite().all()


def test_expected_attention_needs_no_queries_to_come() -> None:
    """Queries of one direction: keys in it are expected to be attended to; a variance raises both ends."""
    policy = make_policy("expected_attention(n_sink=0)")
    values = torch.ones(3, 2)
    keys = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 0.5]])

    def scores(queries: list[list[float]], **settings: bool) -> Tensor:
        count = len(queries)
        seen = Attention(
            torch.tensor(queries)[None, None],
            keys[None, None],
            torch.arange(count)[None],
            torch.arange(3)[None, None],
            Logits(1.0),
        )
        changed = replace(policy, **settings)  # type: ignore[type-var]
        return changed.score(replace(context_of(keys, values), statistics=changed.observe({}, seen)))[0, 0]

    same = scores([[1.0, 0.0]] * 3)
    torch.testing.assert_close(same, torch.softmax(torch.tensor([2.0, -2.0, 0.0]), 0) * 2**0.5)
    both = scores([[1.0, 0.0], [-1.0, 0.0]])
    assert both[0] > both[2]
    assert both[1] > both[2]
    flat = scores([[1.0, 0.0], [-1.0, 0.0]], covariance=False)
    torch.testing.assert_close(flat, torch.full((3,), 2**0.5 / 3), rtol=1e-2, atol=1e-2)


# ---- joined ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_hybrid_does_not_care_for_scale_or_shift(scale: float) -> None:
    table = [0.3, 0.9, 0.1, 0.5, 0.2, 0.8]
    context = context_of(torch.ones(6, 2))
    plain = Hybrid(Given(table), Recency()).score(context)
    other = Hybrid(Given([scale * (x + 3) for x in table]), Recency()).score(context)
    torch.testing.assert_close(plain, other, rtol=1e-3, atol=1e-3)
    assert torch.equal(Hybrid(Given([0.7] * 6), Recency()).score(context).argsort(), torch.arange(6)[None, None])


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

"""Query-aware policies, the newer KV-only ones and the modifiers against plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_paged_eviction import EvictionPolicy, ScoreContext, available_policies, make_policy
from policy_inputs import Text, heads_of, text
from slow_attention_policies import SLOW_ATTENTION_POLICIES, entropy

ALL = sorted(SLOW_ATTENTION_POLICIES)


def slowly(name: str, given: Text) -> Tensor:
    """The loop's scores, nan where a pad is."""
    window = make_policy(name).needs.window
    scores = torch.full(given.positions.shape, float("nan"))
    for row in range(scores.shape[0]):
        for at, head in enumerate(heads_of(given, row)):
            first = 0 if window is None else max(0, head.length - window)
            found = torch.tensor(SLOW_ATTENTION_POLICIES[name](head, first), dtype=torch.float32)
            real = given.positions[row, at] >= 0
            scores[row, at, real] = found[given.positions[row, at, real]]
    return scores


def quickly(policy: EvictionPolicy, given: Text, size: int | None = None) -> tuple[Tensor, ScoreContext]:
    context = given.context(policy, given.all_pieces(policy, size))
    return policy.score(context), context


def assert_scores(found: Tensor, expected: Tensor, valid: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    found, expected = found[valid], expected[valid]
    # What is brought to a common scale comes from differences of larger numbers.
    largest = float(expected[expected.isfinite()].abs().amax())
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=max(2e-6, 1e-5 * largest))


def test_every_policy_has_a_loop() -> None:
    from reference import SLOW_POLICIES

    looped = {name.split("(")[0] for name in ALL} | set(SLOW_POLICIES)
    assert set(available_policies()) <= looped


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ALL)
def test_score_is_the_loops(name: str, seed: int) -> None:
    given = text(seed=seed)
    scores, context = quickly(make_policy(name), given)
    assert_scores(scores, slowly(name, given), context.valid)


@pytest.mark.parametrize("name", ALL)
def test_slots_do_not_matter(name: str) -> None:
    """Heads may even hold their tokens in different orders."""
    given = text(seed=2)
    mixed = given.shuffled(3)
    scores, context = quickly(make_policy(name), mixed)
    assert_scores(scores, slowly(name, mixed), context.valid)


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("name", ALL)
def test_pieces_do_not_matter(name: str, size: int) -> None:
    given, policy = text(seed=4), make_policy(name)
    if policy.needs.window == 1 and size > 1:
        size = 1
    scores, context = quickly(policy, given, size)
    assert_scores(scores, slowly(name, given), context.valid)


@pytest.mark.parametrize("name", ALL)
def test_the_order_inside_a_piece_does_not_matter(name: str) -> None:
    """The queries of a block come in the order of their places, which need not be that of the text."""
    given, policy = text(seed=5), make_policy(name)
    pieces = [piece[3:] + piece[:3] for piece in given.all_pieces(policy, 6)]
    context = given.context(policy, pieces)
    assert_scores(policy.score(context), slowly(name, given), context.valid)


@pytest.mark.parametrize("name", ALL)
def test_rows_and_pads_do_not_matter(name: str) -> None:
    """The same row alone, without its pads."""
    given, policy = text(seed=6), make_policy(name)
    alone = Text(given.keys[2:, :, 4:], given.values[2:, :, 4:], given.queries[2:, :, 4:], given.positions[2:, :, 4:])
    torch.testing.assert_close(quickly(policy, given)[0][2:, :, 4:], quickly(policy, alone)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_scores_are_float32_whatever_the_model(name: str, dtype: torch.dtype) -> None:
    given = text(seed=7, dtype=dtype)
    scores, context = quickly(make_policy(name), given)
    assert scores.dtype == torch.float32
    assert not scores[context.valid].isnan().any()


@pytest.mark.parametrize("name", ALL)
def test_nothing_observed_yet(name: str) -> None:
    """Before the first query all scores are there, and none is nan."""
    given, policy = text(), make_policy(name)
    context = given.context(policy, []) if not policy.needs.row_statistics else _unobserved(given, policy)
    scores = policy.score(context)
    assert scores.shape == given.positions.shape
    assert not scores[context.valid].isnan().any()


def _unobserved(given: Text, policy: EvictionPolicy) -> ScoreContext:
    statistics = {name: torch.zeros(given.positions.shape) for name in policy.needs.token_statistics}
    seen = given.positions[:, 0].amax(-1) + 1
    return ScoreContext(given.keys, given.values, given.positions, seen, 1, statistics)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_pads_and_queries_that_do_not_count(name: str) -> None:
    """A row whose queries do not count keeps its statistics, and a row of pads alone harms nobody."""
    given, policy = text(seed=8), make_policy(name)
    if not policy.needs.queries:
        return
    before = given.context(policy, given.all_pieces(policy)).statistics
    silent = replace(given.attention(range(5)), query_positions=torch.full((3, 5), -1))
    after = policy.observe(dict(before), silent)
    for key, value in before.items():
        torch.testing.assert_close(after[key], value)
    positions = given.positions.clone()
    positions[1] = -1
    empty = replace(given, positions=positions)
    scores, context = quickly(policy, empty)
    assert not scores[context.valid].isnan().any()
    torch.testing.assert_close(scores[::2], quickly(policy, given)[0][::2], equal_nan=True)


@pytest.mark.parametrize("name", ALL)
def test_observing_is_deterministic_and_changes_nothing_in_place(name: str) -> None:
    given, policy = text(seed=9), make_policy(name)
    first = given.context(policy, given.all_pieces(policy))
    copies = {key: value.clone() for key, value in first.statistics.items()}
    assert torch.equal(policy.score(first), policy.score(first))
    if policy.needs.queries:
        policy.observe(dict(first.statistics), given.attention(range(3)))
    assert all(torch.equal(first.statistics[key], copy) for key, copy in copies.items())


def test_the_adaptive_rows_really_differ() -> None:
    """Otherwise the loop would have compared one branch only."""
    rows = [heads_of(text(seed=0), row)[0] for row in range(3)]
    signals = []
    for head in rows:
        weights = torch.exp(-(head.length - 1 - torch.arange(head.length)) / 5)
        signals.append(float((weights * torch.tensor(entropy(head))).sum() / weights.sum()))
    assert min(signals) < 0.6 < max(signals), signals

"""Query-aware policies, the newer KV-only ones and the modifiers against plain loops."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_paged_eviction import EvictionPolicy, ScoreContext, make_policy
from policy_inputs import Text, heads_of, text
from policy_kinds import NAMES
from slow_attention_policies import SLOW_ATTENTION_POLICIES, entropy

ALL = sorted(SLOW_ATTENTION_POLICIES)


def slowly(name: str, inputs: Text) -> Tensor:
    """The loop's scores, nan where a pad is."""
    window = make_policy(name).needs.window
    scores = torch.full(inputs.positions.shape, float("nan"))
    for row in range(scores.shape[0]):
        for at, head in enumerate(heads_of(inputs, row)):
            first = 0 if window is None else max(0, head.length - window)
            head_scores = torch.tensor(SLOW_ATTENTION_POLICIES[name](head, first), dtype=torch.float32)
            real = inputs.positions[row, at] >= 0
            scores[row, at, real] = head_scores[inputs.positions[row, at, real]]
    return scores


def quickly(policy: EvictionPolicy, inputs: Text, size: int | None = None) -> tuple[Tensor, ScoreContext]:
    context = inputs.context(policy, inputs.all_pieces(policy, size))
    return policy.score(context), context


def assert_scores(scores: Tensor, expected: Tensor, valid: Tensor) -> None:
    assert scores.shape == expected.shape
    assert scores.dtype == torch.float32
    scores, expected = scores[valid], expected[valid]
    # What is brought to a common scale comes from differences of larger numbers.
    largest = float(expected[expected.isfinite()].abs().amax())
    torch.testing.assert_close(scores, expected, rtol=2e-4, atol=max(2e-6, 1e-5 * largest))


def test_every_policy_has_a_loop() -> None:
    from reference import SLOW_POLICIES

    looped = {name.split("(")[0] for name in ALL} | set(SLOW_POLICIES)
    assert set(NAMES) <= looped


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ALL)
def test_score_is_the_loops(name: str, seed: int) -> None:
    inputs = text(seed=seed)
    scores, context = quickly(make_policy(name), inputs)
    assert_scores(scores, slowly(name, inputs), context.valid)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_pads_and_queries_that_do_not_count(name: str) -> None:
    """A row whose queries do not count keeps its statistics, and a row of pads alone harms nobody."""
    inputs, policy = text(seed=8), make_policy(name)
    if not policy.needs.queries:
        return
    before = inputs.context(policy, inputs.all_pieces(policy)).statistics
    silent = replace(inputs.attention(range(5)), query_positions=torch.full((3, 5), -1))
    after = policy.observe(dict(before), silent)
    for key, value in before.items():
        torch.testing.assert_close(after[key], value)
    positions = inputs.positions.clone()
    positions[1] = -1
    empty = replace(inputs, positions=positions)
    scores, context = quickly(policy, empty)
    assert not scores[context.valid].isnan().any()
    torch.testing.assert_close(scores[::2], quickly(policy, inputs)[0][::2], equal_nan=True)


def test_the_adaptive_rows_really_differ() -> None:
    """Otherwise the loop would have compared one branch only."""
    rows = [heads_of(text(seed=0), row)[0] for row in range(3)]
    signals = []
    for head in rows:
        weights = torch.exp(-(head.length - 1 - torch.arange(head.length)) / 5)
        signals.append(float((weights * torch.tensor(entropy(head))).sum() / weights.sum()))
    assert min(signals) < 0.6 < max(signals), signals

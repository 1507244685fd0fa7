"""Each policy against its formula written as a loop, and the registry."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import (
    EvictionPolicy,
    Needs,
    PagedEvictionCache,
    ScoreContext,
    available_policies,
    make_policy,
    register_policy,
)
from hf_paged_eviction.policies import registry
from hf_paged_eviction.policies.keys.streaming_llm import StreamingLLM
from hf_paged_eviction.ranking import rank_keys
from reference import SLOW_POLICIES
from registries import forget_after


def context(
    rows: int = 3, heads: int = 2, tokens: int = 11, dtype: torch.dtype = torch.float32, layer_idx: int = 1
) -> ScoreContext:
    """Random states; the rows start with 0, 2 and 4 pads full of nonsense."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(rows, heads, tokens, 6, generator=generator)
    values = torch.randn(rows, heads, tokens, 4, generator=generator)
    positions = torch.arange(tokens) - 2 * torch.arange(rows)[:, None]
    pads = positions < 0
    positions = positions.masked_fill(pads, -1)[:, None].expand(-1, heads, -1)
    keys = keys.masked_fill(pads[:, None, :, None], 1e4)
    return ScoreContext(keys.to(dtype), values.to(dtype), positions, positions[:, 0].amax(-1) + 1, layer_idx)


def slowly(name: str, context: ScoreContext) -> Tensor:
    """The loop's scores, nan where a pad is."""
    scores = torch.full(context.positions.shape, float("nan"))
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            real = context.valid[row, head].nonzero()[:, 0].tolist()
            scores[row, head, real] = torch.tensor(
                SLOW_POLICIES[name](
                    [context.keys[row, head, at].tolist() for at in real],
                    [context.values[row, head, at].tolist() for at in real],
                    [int(context.positions[row, head, at]) for at in real],
                    context.layer_idx,
                    head,
                )
            )
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(SLOW_POLICIES))
def test_score_is_the_papers(name: str, dtype: torch.dtype) -> None:
    inputs = context(dtype=dtype)
    scores = make_policy(name).score(inputs)
    assert scores.shape == inputs.positions.shape
    assert scores.dtype == torch.float32
    expected = slowly(name, inputs)
    real = inputs.valid
    torch.testing.assert_close(scores[real], expected[real], rtol=1e-5, atol=1e-6)


def test_random_is_a_function_of_seed_layer_head_and_position() -> None:
    positions = torch.arange(4000)[None, None].expand(2, 3, -1)

    def draw(seed: int, layer: int, dims: int = 4) -> Tensor:
        states = torch.randn(2, 3, 4000, dims)
        inputs = ScoreContext(states, states, positions, torch.tensor([4000, 4000]), layer)
        return make_policy("random").__class__(seed=seed).score(inputs)  # type: ignore[call-arg]

    first = draw(0, 0)
    assert torch.equal(first, draw(0, 0, dims=8)), "the states must not matter"
    assert torch.equal(first[0], first[1]), "the row must not matter"
    for other in (draw(1, 0)[0], draw(0, 1)[0], first[0].roll(1, 0)):
        correlation = torch.corrcoef(torch.stack([first[0].flatten(), other.flatten()]))[0, 1]
        assert correlation.abs() < 0.05
    assert (first >= 0).all()
    assert (first < 1).all()
    assert abs(first.mean().item() - 0.5) < 0.02
    assert abs(first.std().item() - 12**-0.5) < 0.02
    # Scrambled, not a ramp: neighbours are independent.
    assert torch.corrcoef(torch.stack([first[0, 0, 1:], first[0, 0, :-1]]))[0, 1].abs() < 0.05


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_after(monkeypatch, registry.POLICIES)
    yield


def test_available_policies_are_sorted_and_complete() -> None:
    names = available_policies()
    assert list(names) == sorted(names)
    assert set(SLOW_POLICIES) <= set(names)
    assert all(isinstance(make_policy(name), EvictionPolicy) for name in names)


@pytest.mark.usefixtures("clean_registry")
def test_a_policy_of_the_users_own_in_ten_lines() -> None:
    @register_policy("even_positions")
    @dataclass(frozen=True)
    class EvenPositions(EvictionPolicy):
        needs = Needs(token_local=True)

        def score(self, context: ScoreContext) -> Tensor:
            return 1.0 - (context.positions % 2).float()

    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy="even_positions")
    ids, mask = models.left_pad(models.prompts([40]))
    modes.forward(model, cache, ids, mask, 0, 40)
    held = cache.layers[0].positions[0, 0].tolist()
    # Protected: 0..3 and 36..39. Of 4..35 sixteen stay, all of them even.
    assert held == [0, 1, 2, 3, *range(4, 36, 2), 36, 37, 38, 39]
    assert "even_positions" in available_policies()


@pytest.mark.usefixtures("clean_registry")
def test_names_are_unique() -> None:
    class Mine(EvictionPolicy):
        def score(self, context: ScoreContext) -> Tensor:
            return context.positions.float()

    register_policy("mine")(Mine)
    register_policy("mine")(Mine)  # a notebook cell that is run twice
    with pytest.raises(ValueError, match="'recency' is taken"):
        register_policy("recency")(Mine)
    with pytest.raises(TypeError, match="subclass of EvictionPolicy"):
        register_policy("other")(int)  # type: ignore[type-var]


@pytest.mark.parametrize("wrong", [3, None, StreamingLLM])
def test_neither_name_nor_policy(wrong: Any) -> None:
    with pytest.raises(TypeError, match="policy"):
        make_policy(wrong)


class Fixed(EvictionPolicy):
    """Scores by position from a table."""

    needs = Needs(token_local=True)

    def __init__(self, table: list[float]) -> None:
        self.table = torch.tensor(table)

    def score(self, context: ScoreContext) -> Tensor:
        return self.table[context.positions.clamp(0, len(self.table) - 1)]


def held_after(policy: EvictionPolicy, length: int, budget: int, block: int = 1, sinks: int = 0) -> list[int]:
    model = models.shared("llama")
    cache = PagedEvictionCache(model.config, budget=budget, block_size=block, sink_tokens=sinks, policy=policy)
    ids, mask = models.left_pad(models.prompts([length]))
    modes.forward(model, cache, ids, mask, 0, length)
    return cache.layers[0].positions[0, 0].tolist()


def test_high_scores_stay_and_ties_lose_the_oldest() -> None:
    assert held_after(Fixed([5, 1, 5, 1, 5, 1, 0]), 7, 4) == [0, 2, 4, 6]
    assert held_after(Fixed([1, 1, 1, 1, 1, 1, 1]), 7, 4) == [3, 4, 5, 6]


def test_a_key_of_nearly_no_length_does_not_hide_the_others() -> None:
    # Values further apart than what scores are rounded to.
    sizes = 1 + torch.randperm(40, generator=torch.Generator().manual_seed(0)).float()
    values, keys = sizes[None, None, :, None].expand(1, 1, 40, 4), torch.ones(1, 1, 40, 4)
    keys[0, 0, 7] = 1e-12
    positions = torch.arange(40)[None, None]
    policy = make_policy("paged_eviction")
    scores = policy.score(ScoreContext(keys, values, positions, torch.tensor([40]), 0))
    assert scores[0, 0, 7] > 1e4
    keys_of_rank = rank_keys(scores, positions, positions >= 0, policy.needs.absolute_noise)[0, 0]
    assert keys_of_rank.argsort().tolist() == scores[0, 0].argsort().tolist()


class Wavering(Fixed):
    """Differences: what should be equal is off by a rounding error."""

    needs = Needs(absolute_noise=True)


def test_a_policy_says_that_its_noise_is_absolute() -> None:
    noisy = [1e-8, 0.9, -1e-8, 2e-8, 0.7, -0.8, 0.0]
    assert held_after(Wavering(noisy), 7, 4) == [1, 3, 4, 6]
    assert held_after(Wavering([-score for score in noisy]), 7, 4) == [2, 3, 5, 6]
    assert held_after(Fixed(noisy), 7, 5) == [0, 1, 3, 4, 6]
    assert make_policy("adaptive(tova, keydiff)").needs.absolute_noise
    assert make_policy("graphkv(hybrid(h2o, tova))").needs.absolute_noise
    assert not make_policy("caote(h2o)").needs.absolute_noise


def test_infinities_pin_and_nan_is_lowest() -> None:
    inf, nan = float("inf"), float("nan")
    assert held_after(Fixed([inf, 3, -inf, 2, nan, 1, 0]), 7, 4) == [0, 1, 3, 6]
    # An infinity says nothing about the scale of the others.
    assert held_after(Fixed([inf, 5, 1, 4, 2, 3, 0]), 7, 4) == [0, 1, 3, 6]


def test_wrong_shapes_are_refused() -> None:
    class Flat(EvictionPolicy):
        def score(self, context: ScoreContext) -> Tensor:
            return context.positions.float()[:, 0]

    with pytest.raises(ValueError, match="kv_heads"):
        held_after(Flat(), 7, 4)


def test_shared_heads_average_and_separate_heads_do_not() -> None:
    class ByHead(EvictionPolicy):
        """Head 0 wants low positions, head 1 high ones, twice as strongly."""

        needs = Needs(token_local=True)

        def score(self, context: ScoreContext) -> Tensor:
            return context.positions.float() * torch.tensor([-1.0, 2.0])[:, None]

    model = models.shared("llama")
    held = {}
    for heads in ("shared", "separate"):
        cache = PagedEvictionCache(model.config, 6, 1, ByHead(), heads, 0)  # type: ignore[arg-type]
        ids, mask = models.left_pad(models.prompts([12]))
        modes.forward(model, cache, ids, mask, 0, 12)
        held[heads] = cache.layers[0].positions[0].tolist()
    assert held["shared"] == [[6, 7, 8, 9, 10, 11]] * 2
    assert held["separate"] == [[0, 1, 2, 3, 4, 11], [6, 7, 8, 9, 10, 11]]

"""Corners of the bookkeeping, layer by layer and without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction import EvictionPolicy, PagedEvictionCache, ScoreContext, StoragePool
from hf_paged_eviction.budget import BlockBudget
from hf_paged_eviction.layer import PagedLayer
from hf_paged_eviction.layer_group import LayerGroup
from hf_paged_eviction.static_layer import StaticLayer
from hf_paged_eviction.static_sliding_layer import StaticSlidingLayer
from hf_paged_eviction.static_steps import StaticSteps

BLOCK, BUDGET = 4, 24


@dataclass(frozen=True)
class Counting(EvictionPolicy):
    """The score is the first number of the value; notes how many tokens it was asked about."""

    token_local: ClassVar[bool] = True
    asked: list[int] = field(default_factory=list)

    def score(self, context: ScoreContext) -> Tensor:
        self.asked.append(context.keys.shape[2])
        return context.values[..., 0].float()


def make(policy: EvictionPolicy | None = None, budget: int = BUDGET) -> PagedLayer:
    return PagedLayer(BlockBudget.validate(budget, None, BLOCK, None, 0), policy or Counting())


def states(count: int, width: int = 2, rows: int = 1) -> Tensor:
    return torch.randn(rows, 1, count, width)


def test_values_of_another_width_get_another_storage() -> None:
    """After `reset` the keys of the next prompt fit what is left, its values do not."""
    layer = make()
    layer.update(states(9), states(9))
    for width in (1, 3):
        layer.reset()
        values = states(9, width)
        layer.update(states(9), values)
        assert layer.values is not None and torch.equal(layer.values[:, :, :9], values)


def test_only_new_tokens_are_scored() -> None:
    """Where the score of a token depends on nothing else, it is worked out once."""
    policy = Counting()
    layer = make(policy)
    layer.update(states(40), states(40))
    layer.update(states(5), states(5))
    # The second forward asks for the newest block, of which no score is kept, and for its own tokens.
    assert policy.asked == [40, BLOCK, 5]


def test_reserve_in_half_precision() -> None:
    pool, config = StoragePool(), models.family_config("llama")

    def cache() -> PagedEvictionCache:
        return PagedEvictionCache(config, budget=BUDGET, block_size=BLOCK, pool=pool)

    shape: dict[str, Any] = {"batch_size": 1, "num_heads": 2, "head_dim": 8, "device": "cpu"}
    pool.reserve(cache, 1, dtype=torch.float16, **shape)
    reserved = pool.free_bytes
    assert reserved == config.num_hidden_layers * 2 * 2 * BUDGET * 8 * 2  # K and V, heads, slots, dim, bytes
    one = cache()
    for layer in one.layers:
        layer.update(*torch.ones(2, 1, 2, 9, 8, dtype=torch.float16))
    assert (pool.taken_bytes, pool.free_bytes) == (reserved, 0)


def test_layers_that_chose_together_in_inference_mode_and_go_on_out_of_it() -> None:
    """What they share then is written to in either mode."""
    one, other, alone = make(), make(), make()
    one.group = other.group = LayerGroup([one, other])
    with torch.inference_mode():
        text = torch.randn(2, 1, 1, 60, 2)
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 60))]:
        with torch.inference_mode(start < 36):
            for layer in (one, other, alone):
                layer.update(*text[:, :, :, start:stop].clone())
    assert torch.equal(one.positions, alone.positions)
    assert torch.equal(other.block_scores(), alone.block_scores())


def static_pair(window: int = 8) -> tuple[StaticLayer, StaticSlidingLayer]:
    """A paged and a sliding layer that take steps together, the sliding one last."""
    paged = StaticLayer(BlockBudget.validate(BUDGET, None, BLOCK, None, 0), Counting())
    sliding = StaticSlidingLayer(window)
    StaticSteps([paged], [sliding], sliding)
    return paged, sliding


@pytest.mark.parametrize("prompt", [1, 6, 7, 8, 23, 24, 30])
def test_compiled_code_is_told_the_same_sizes(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = static_pair()
    for layer in layers:
        layer.update(states(prompt), states(prompt))
    for seen in range(prompt, prompt + 4):
        layers[0].steps.prepare()
        expected = [(layer.get_seq_length(), layer.get_mask_sizes(1)) for layer in layers]
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            compiled = [(layer.get_seq_length(), layer.get_mask_sizes(1)) for layer in layers]
        sizes = [(seen, (BUDGET, max(seen + 1 - BUDGET, 0))), (seen, (8, max(seen - 7, 0)))]
        assert [(int(count), (length, int(offset))) for count, (length, offset) in compiled] == expected == sizes
        for layer in layers:
            layer.update(states(1), states(1))


def test_a_static_sliding_layer_takes_nothing_back() -> None:
    sliding = static_pair()[1]
    sliding.update(states(9), states(9))
    with pytest.raises(ValueError, match=r"^A static cache cannot take tokens back \(crop\): .*static=False\.$"):
        sliding.crop(-1)

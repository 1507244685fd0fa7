"""Corners of the bookkeeping, layer by layer and without a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction import EvictionPolicy, Needs, PagedEvictionCache, ScoreContext
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction.layer.parameters import Common, Place
from hf_paged_eviction.layer.plan import Plan
from hf_paged_eviction.masks.padding import Padding
from hf_paged_eviction.table.budget import BlockBudget

BLOCK, BUDGET = 4, 24


@dataclass(frozen=True)
class Counting(EvictionPolicy):
    """The score is the first number of the value; notes how many tokens it was asked about."""

    needs = Needs(token_local=True)
    token_counts: list[int] = field(default_factory=list)

    def score(self, context: ScoreContext) -> Tensor:
        self.token_counts.append(context.keys.shape[2])
        return context.values[..., 0].float()


@dataclass(frozen=True)
class Following(EvictionPolicy):
    """The first number of the value again; notes how many real tokens each row is said to have seen."""

    needs = Needs(token_local=True, by_layer=False)
    seen: list[list[int]] = field(default_factory=list)

    def score(self, context: ScoreContext) -> Tensor:
        self.seen.append(context.seen.tolist())
        return context.values[..., 0].float()


SIZES = BlockBudget.validate(BUDGET, BLOCK, None)


def make(policy: EvictionPolicy | None = None, padding: Padding | None = None) -> PagedLayer:
    return PagedLayer(SIZES, Common(policy or Counting(), padding=padding or Padding()), Place())


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
    assert policy.token_counts == [40, BLOCK, 5]


def test_storage_made_early_in_half_precision() -> None:
    cache = PagedEvictionCache(models.family_config("llama"), budget=BUDGET, block_size=BLOCK)
    for layer in cache.layers:
        layer.lazy_initialization(*torch.empty(2, 1, 2, 0, 8, dtype=torch.float16))
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (1, 2, BUDGET, 8)
        layer.update(*torch.ones(2, 1, 2, 9, 8, dtype=torch.float16))
        assert layer.keys.dtype == torch.float16
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses


def test_layers_that_chose_together_in_inference_mode_and_go_on_out_of_it() -> None:
    """What they share then is written to in either mode."""
    one, other, alone = make(), make(), make()
    one.plan = other.plan = Plan([one.state, other.state], one.padding)
    with torch.inference_mode():
        text = torch.randn(2, 1, 1, 60, 2)
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 60))]:
        with torch.inference_mode(start < 36):
            for layer in (one, other, alone):
                layer.update(*text[:, :, :, start:stop].clone())
    assert torch.equal(one.positions, alone.positions)
    assert torch.equal(other.block_scores(), alone.block_scores())


def static_layer(padding: Padding | None = None) -> PagedLayer:
    """A layer whose single tokens come in compiled steps."""
    return PagedLayer(SIZES, Common(Counting(), padding=padding or Padding(), static=True), Place())


@pytest.mark.parametrize("prompt", [1, 6, 7, 8, 23, 24, 30])
def test_compiled_code_is_told_the_same_sizes(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = static_layer()
    layer.update(states(prompt), states(prompt))
    for seen in range(prompt, prompt + 4):
        layer.plan.prepare()
        expected = layer.get_seq_length(), layer.get_mask_sizes(1)
        assert layer.get_mask_sizes(torch.arange(seen, seen + 1)) == expected[1]
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            count, (length, offset) = layer.get_seq_length(), layer.get_mask_sizes(1)
        assert (int(count), (length, int(offset))) == expected == (seen, (BUDGET, max(seen + 1 - BUDGET, 0)))
        layer.update(states(1), states(1))


def test_layers_that_choose_together_tell_what_each_row_has_seen() -> None:
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, :3] = False
    policy, padding = Following(), Padding(mask)
    layers = [make(policy, padding), make(policy, padding)]
    plan = Plan([layer.state for layer in layers], padding)
    for start, stop in [(0, 30), *((at, at + 1) for at in range(30, 35))]:
        for layer in layers:
            layer.plan = plan
            layer.update(states(stop - start, rows=2), states(stop - start, rows=2))
    assert policy.seen == [[27, 30]] * 2 + [[27, 30] * 2, [31, 34] * 2]


@pytest.mark.parametrize("prompt", [21, 22, 23, 24, 25])
def test_pads_in_the_middle_move_before_the_last_free_slot_is_taken(prompt: int) -> None:
    mask = torch.ones(1, 40, dtype=torch.bool)
    mask[:, [2, 9, 10]] = False
    padding = Padding(mask)
    plain, static = make(padding=padding), static_layer(padding)
    for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, 40))]:
        keys, values = states(stop - start), states(stop - start)
        for layer in (plain, static):
            layer.update(keys, values)
        assert torch.equal(plain.block_table(), static.block_table())
        assert torch.equal(plain.positions, static.positions)
    assert torch.equal(plain.store.tensors[0], static.store.tensors[0])


def test_a_static_step_that_attention_did_not_tell_of() -> None:
    model = models.shared("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=BUDGET, block_size=BLOCK, policy="h2o", static=True)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 30, dtype=torch.int64), **{CACHE_ARGUMENT: cache})
    first = cache.layers[0]
    states = torch.ones(1, first.keys.shape[1], 1, first.keys.shape[3])
    first.update(states, states)
    with pytest.raises(RuntimeError, match=r"'h2o'.*0.*paged_eviction"):
        first.update(states, states)


def test_victims_are_counted_in_whole_numbers() -> None:
    layer = make()
    for count in (3, *[1] * 30):
        layer.update(states(count), states(count))
        evicted = max(layer.get_seq_length() - BUDGET, 0)
        assert layer.table.choice.evicted_blocks.dtype == torch.int64
        assert layer.table.choice.evicted_blocks.tolist() == [-(-evicted // BLOCK)]


def test_nothing_is_known_of_pads_before_a_step_is_prepared() -> None:
    layer = static_layer()
    assert not layer.all_real
    for _ in range(2):
        layer.update(states(30), states(30))
        assert not layer.all_real
        layer.plan.prepare()
        assert layer.all_real


@pytest.mark.parametrize("pads", [0, 3])
def test_when_all_slots_are_known_to_be_real(pads: int) -> None:
    """Then attention needs no mask: from the start, or once the last pad was overwritten."""
    layer = make(padding=Padding(torch.arange(40)[None] >= pads))
    assert not layer.all_real
    for count in (9, *[1] * 31):
        layer.update(states(count), states(count))
        assert layer.all_real == (pads == 0 or layer.get_seq_length() >= BUDGET + pads)
        assert layer.all_real == bool((layer.positions >= 0).all())


def test_tokens_that_wait_are_not_known_to_be_real() -> None:
    layer = make(padding=Padding(torch.arange(40)[None] != 31))
    layer.activate_past_recording()
    for start, stop in [(0, 30), (30, 31), (31, 32)]:
        layer.update(states(stop - start), states(stop - start))
        assert not layer.all_real
    layer.crop(-1)
    assert layer.all_real

"""allocator="global": one threshold over all layers and heads."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.policies import ScoreContext
from hf_paged_eviction.policies.keys.value_norm import ValueNorm
from reference import Recorder, slow_threshold

pytestmark = pytest.mark.contract

OURS = "paged_eviction"
BLOCK = 4
#: Of 24 tokens in two rows, layers and heads of eight channels, keys and values.
BYTES = 24 * 2 * 2 * 2 * 2 * 8 * 4


def coarse(values: Tensor) -> Tensor:
    """Norms with few bits, so that many tokens of all layers and heads are equal."""
    return (values.float().norm(dim=-1) * 4).round() / 4


@dataclass(frozen=True)
class Coarse(ValueNorm):
    name = "coarse"
    needs = replace(ValueNorm.needs, common_unit=True)

    def score(self, context: ScoreContext) -> Tensor:
        return coarse(context.values)


def forwards(length: int, chunk: int | None) -> list[tuple[int, int]]:
    step = length if chunk is None else chunk
    return [(start, min(start + step, length)) for start in range(0, length, step)]


@pytest.mark.parametrize("heads", ["separate", "shared"])
@pytest.mark.parametrize("budget", [16, 24, 36])
@pytest.mark.parametrize("chunk", [None, 17], ids=["one forward", "chunks"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_forward_ends_with_one_decision(heads: Any, budget: int, chunk: int | None, padded: bool) -> None:
    """After each forward each layer and head holds what the slow rule keeps of all that was there."""
    model = models.build("llama", OURS, num_hidden_layers=4)
    cache = PagedEvictionCache(
        model.config, budget, BLOCK, Coarse(), heads, sink_tokens=2, recent_tokens=3, allocator="global"
    )
    sizes = cache.paged_layers[0][1].budget
    ids, mask = models.left_pad(models.prompts([60, 41, 19] if padded else [60, 60], seed=2))
    before: dict[int, dict[tuple[int, int], set[int]]] = {row: {} for row in range(len(ids))}
    differ = 0
    with Recorder(model, cache) as recorder:
        for start, stop in forwards(60, chunk):
            modes.forward(model, cache, ids, mask, start, stop)
            positions_of = {index: layer.positions for index, layer in cache.paged_layers}
            for row, held_before in before.items():
                columns = [column for column in recorder.columns if column.real[row]]
                if not columns:
                    continue
                new = {at for at, column in enumerate(columns) if column.forward == len(recorder.forwards) - 1}
                held = {}
                for index in positions_of:
                    values = torch.stack([column.values[index][row] for column in columns])  # [tokens, heads, dim]
                    scores = coarse(values)
                    scores = scores.mean(1, keepdim=True) if heads == "shared" else scores
                    for head in range(scores.shape[1]):
                        there = held_before.get((index, head), set()) | new
                        held[index, head] = {at: scores[at, head].item() for at in there}
                expected = slow_threshold(held, budget * len(held), budget, sizes)
                for (index, head), positions in expected.items():
                    assert {*positions_of[index][row, head].tolist()} - {-1} == positions
                differ += len({len(positions) for positions in expected.values()}) > 1
                before[row] = expected
    assert differ, "all heads got the same"


@pytest.mark.parametrize("heads", ["separate", "shared"])
@pytest.mark.parametrize(("budget", "block"), [(16, 4), (36, 4), (64, 1), (48, 8)])
def test_single_tokens_leave_the_budgets_as_they_are(heads: Any, budget: int, block: int) -> None:
    """Each set holds its budget for as long as single tokens come, those of the padded row too."""
    model = models.build("llama", OURS, num_hidden_layers=3)
    ids, mask = models.left_pad(models.prompts([140, 121], seed=4))
    settings: dict[str, Any] = {"sink_tokens": 2, "recent_tokens": 3, "allocator": "global"}
    cache = PagedEvictionCache(model.config, budget, block, Coarse(), heads, **settings)
    modes.forward(model, cache, ids, mask, 0, 100)
    limits = [layer.table.limits.clone() for _, layer in cache.paged_layers]
    assert len(torch.cat(limits, dim=1).unique()) > 1
    for at in range(100, 140):
        modes.forward(model, cache, ids, mask, at, at + 1)
        for (_, layer), limit in zip(cache.paged_layers, limits, strict=True):
            assert torch.equal(layer.table.limits, limit)
            assert torch.equal(layer.positions.ge(0).sum(-1), limit.expand(-1, layer.positions.shape[1]))


@pytest.mark.parametrize("chunk", [None, 17], ids=["one forward", "chunks"])
def test_the_total_holds(chunk: int | None) -> None:
    """After every forward."""
    model = models.build("llama", OURS, num_hidden_layers=4)
    cache = PagedEvictionCache(model.config, 24, BLOCK, "kvzip", "separate", allocator="global")
    ids, mask = models.left_pad(models.prompts([100, 70]))
    settings = {} if chunk is None else {"prefill_chunk_size": chunk}
    modes.generate(model, cache, ids, mask, 8, **settings)
    held = sum(layer.positions.ge(0).sum((1, 2)) for _, layer in cache.paged_layers)
    assert held.tolist() == [24 * 4 * model.config.num_key_value_heads] * 2


@pytest.mark.parametrize("requested", [{"budget": f"{BYTES + 100}B"}, {"budget": "40%"}], ids=["bytes", "share"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_budget_that_the_prompt_shows(requested: dict[str, Any], padded: bool) -> None:
    """Bytes, and a share of the prompt, are a budget in tokens as soon as there are some."""
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([60, 41] if padded else [60, 60]))
    settings: dict[str, Any] = {"policy": Coarse(), "heads": "separate", "allocator": "global"}
    by_size, by_tokens = (
        PagedEvictionCache(model.config, block_size=BLOCK, **settings, **size) for size in (requested, {"budget": 24})
    )
    for _ in range(2):  # the second prompt, after `reset`, too
        sequences = [modes.generate(model, cache, ids, mask, 12) for cache in (by_size, by_tokens)]
        assert by_size.budget == 24 and torch.equal(*sequences)
        for (_, ours), (_, expected) in zip(by_size.paged_layers, by_tokens.paged_layers, strict=True):
            assert torch.equal(ours.positions, expected.positions)
        assert by_size.stats().storage_bytes <= BYTES
        by_size.reset()
        by_tokens.reset()


def test_scores_without_a_common_unit_are_refused() -> None:
    config = models.shared("llama", OURS).config
    for policy in ("snapkv", "keydiff", "hybrid(kvzip, tova)"):
        with pytest.raises(ValueError, match="common"):
            PagedEvictionCache(config, 64, policy=policy, allocator="global", heads="separate")


def test_a_smaller_total_is_shared_out_anew() -> None:
    """As if the prompt had met the smaller budget, as long as scores do not depend on what else is held."""
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([60, 41]))
    large, small = (
        PagedEvictionCache(model.config, budget, BLOCK, Coarse(), "separate", allocator="global") for budget in (64, 24)
    )
    for cache in (large, small):
        modes.forward(model, cache, ids, mask, 0, 60)
    large.shrink(24)
    for (_, shrunk), (_, fresh) in zip(large.paged_layers, small.paged_layers, strict=True):
        assert torch.equal(shrunk.positions, fresh.positions)
        assert torch.equal(shrunk.table.limits, fresh.table.limits)

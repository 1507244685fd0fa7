"""allocator="global": one threshold over all layers and heads, found layer by layer."""

from __future__ import annotations

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
from hf_paged_eviction.table.table import AHEAD
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
def test_layer_by_layer_is_a_decision_at_the_end(heads: Any, budget: int, chunk: int | None, padded: bool) -> None:
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
@pytest.mark.parametrize("prompt", [3, 25, 100])
def test_single_tokens_are_decided_on_together(heads: Any, budget: int, block: int, prompt: int) -> None:
    """Whenever a set of a row has no slot left, all of them give up what a decision at this moment does not keep, and
    no sooner; what a row holds does not depend on the others."""
    model = models.build("llama", OURS, num_hidden_layers=3)
    length = prompt + 40
    ids, mask = models.left_pad(models.prompts([length, length - 19], seed=4))
    settings: dict[str, Any] = {"sink_tokens": 2, "recent_tokens": 3, "allocator": "global"}
    cache = PagedEvictionCache(model.config, budget, block, Coarse(), heads, **settings)
    sizes = cache.paged_layers[0][1].budget
    free = budget // block - sizes.protected_blocks - sizes.recent_blocks
    coming = max(1, min(-(-AHEAD // block), free // 4)) * block
    expected: list[dict[tuple[int, int], set[int]]] = [{}, {}]
    decided = 0
    with Recorder(model, cache) as recorder:
        modes.forward(model, cache, ids, mask, 0, prompt)
        for at in range(prompt, length):
            for row, held in enumerate(expected):
                if at == prompt or not held:  # whatever the prompt left; decided on above
                    expected[row] = held = held_by(cache, row)
                limits = limits_of(cache, row)
                full = [place for place, tokens in held.items() if len(tokens) == limits[place]]
                if full and mask[row, at]:
                    columns = [column for column in recorder.columns if column.real[row]]
                    scores = {
                        (index, head): {
                            token: score(columns[token].values[index][row], heads, head) for token in tokens
                        }
                        for (index, head), tokens in held.items()
                    }
                    expected[row] = slow_threshold(scores, budget * len(scores), budget, sizes, coming)
                    decided += 1
            modes.forward(model, cache, ids, mask, at, at + 1)
            for row, held in enumerate(expected):
                if mask[row, at]:
                    new = int(mask[row, : at + 1].sum()) - 1
                    expected[row] = held = {place: tokens | {new} for place, tokens in held.items()}
                assert held_by(cache, row) == held
    assert decided >= 40 // coming - (budget // coming)


def held_by(cache: PagedEvictionCache, row: int) -> dict[tuple[int, int], set[int]]:
    return {
        (index, head): {*tokens} - {-1}
        for index, layer in cache.paged_layers
        for head, tokens in enumerate(layer.table.positions[row].tolist())
    }


def limits_of(cache: PagedEvictionCache, row: int) -> dict[tuple[int, int], int]:
    return {
        (index, head): limit
        for index, layer in cache.paged_layers
        for head, limit in enumerate(layer.table.usable[row].tolist())
    }


def score(values: Tensor, heads: str, head: int) -> float:
    """Of one token, `[heads, dim]`."""
    scores = coarse(values)
    return (scores.mean() if heads == "shared" else scores[head]).item()


@pytest.mark.parametrize("chunk", [None, 17], ids=["one forward", "chunks"])
def test_the_total_holds(chunk: int | None) -> None:
    """After every forward exactly; while it walks through the layers, but for what one of them was just given."""
    model = models.build("llama", OURS, num_hidden_layers=4)
    cache = PagedEvictionCache(model.config, 24, BLOCK, "kvzip", "separate", allocator="global")
    ids, mask = models.left_pad(models.prompts([100, 70]))
    held: list[int] = []
    for _, layer in cache.paged_layers:
        attended = layer.attended

        def follow(queries: Any, attended: Any = attended) -> None:
            attended(queries)
            held.append(max(sum(layer.positions.ge(0).sum((1, 2)) for _, layer in cache.paged_layers if layer.held)))

        layer.attended = follow
    settings = {} if chunk is None else {"prefill_chunk_size": chunk}
    modes.generate(model, cache, ids, mask, 8, **settings)
    total, chunk_room = 24 * 4 * model.config.num_key_value_heads, (chunk or 100) * model.config.num_key_value_heads
    assert max(held[3::4]) == total < max(held) <= total + chunk_room


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
    with pytest.raises(ValueError, match="static=True"):
        PagedEvictionCache(config, 64, policy="kvzip", allocator="global", static=True)


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

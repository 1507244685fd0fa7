"""Merging: losers go into the tokens that are most like them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_calls import CALLS, SIZES, Play, config, play
from torch import Tensor
from transformers import DynamicCache

import models
import modes
import rows
from closeness import assert_close
from hf_paged_eviction import make_disposal
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.queries.handover import forget_handover
from hf_paged_eviction.queries.observer import Queries
from hf_paged_eviction_lab.merge import Merge
from reference import poison_unused

OURS = "paged_eviction"
SMALL: dict[str, Any] = {"budget": 24, "block_size": 4, "policy": "keydiff"}

# ---- against plain loops ---------------------------------------------------------------------------------------------


class MergePlay(Play):
    """Compares keys, values and masses after every call. Scores are those that tokens came with."""

    def feed_layer(self, index: int, count: int, real: Tensor) -> None:
        shape = (self.rows, self.heads, count)
        # Keys of a few directions, so that many are alike and some are equal.
        keys = torch.eye(4)[self.draw(4, *shape)] * (1 + self.draw(3, *shape, 1))
        keys = keys + self.draw(5, *shape, 4) / 7 * (self.draw(3, *shape, 1) > 0)
        values = torch.cat([self.draw(17, *shape, 1).sub(8) / 8, self.draw(100, *shape, 3) / 10], dim=-1)
        layer = self.cache.layers[index]
        self.slow[index].recording = layer.record_past
        returned, _ = self.cache.update(keys, values, index)
        if layer.recorder is not None:  # there is no attention here
            forget_handover([layer])
            layer.attended(Queries(torch.zeros_like(keys), returned, Logits(1.0)))
        self.slow[index].feed(keys, values, real.bool().tolist())

    def crop(self, count: int, absolute: bool) -> None:
        if not self.cache.layers[0].record_past:  # otherwise what was merged into the newest token goes with it
            return
        waiting = self.cache.layers[0].state.waiting
        super().crop(min(count, waiting), absolute)

    def check(self) -> None:
        for index, slow in enumerate(self.slow):
            layer = self.cache.layers[index]
            if not slow.rows or not slow.held:
                assert layer.held == 0
                continue
            keys, values = layer.keys.tolist(), layer.values.tolist()
            for row in range(self.rows):
                for head in range(self.heads):
                    group = slow.group(row, head)
                    assume(not any(head.near_limits for head in slow.heads(group).values()))
                    slots = layer.positions[row, head].tolist()
                    expected = slow.expected(row, head)
                    assert sorted(p for p in slots if p >= 0) == sorted(expected)
                    mass = layer.action.state.mass[row, head]
                    assert (mass[layer.held :] == 1).all()
                    for slot, position in enumerate(slots):
                        if position < 0:
                            assert mass[slot] == 1
                            continue
                        token = expected[position]
                        assert keys[row][head][slot] == pytest.approx(token.key, rel=1e-4, abs=1e-5)
                        assert values[row][head][slot] == pytest.approx(token.value, rel=1e-4, abs=1e-5)
                        assert mass[slot].item() == pytest.approx(token.mass, rel=1e-5)


GAME = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@GAME
@given(
    rows=st.integers(1, 3),
    sizes=SIZES,
    separate=st.booleans(),
    recording=st.booleans(),
    values_only=st.booleans(),
    fixed=st.sampled_from([None, None, 0.9, -1.0]),
    seed=st.integers(0, 10_000),
    calls=CALLS,
)
def test_any_calls(
    rows: int,
    sizes: Any,
    separate: bool,
    recording: bool,
    values_only: bool,
    fixed: float | None,
    seed: int,
    calls: list[Any],
) -> None:
    disposal = Merge(values_only=values_only, threshold="ema" if fixed is None else fixed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config(), "_attn_implementation", OURS if values_only else "sdpa")
        game = MergePlay(rows, 2, sizes, separate, recording, seed, disposal)
        play(game, calls)


# ---- in a model ------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "merge": {"disposal": "merge"},
    "values": {"disposal": "merge(values_only=True)"},
    "fixed": {"disposal": "merge(threshold=0.2)", "heads": "separate"},
    "values_fixed": {"disposal": "merge(values_only=True, threshold=0.3)", "heads": "separate"},
    "d2o": {"disposal": "merge", "policy": "h2o", "allocator": "d2o"},
    "values_ada_kv": {"disposal": "merge(values_only=True)", "allocator": "ada_kv", "heads": "separate"},
    "cache_positions": {"disposal": "merge(values_only=True)", "positions": "cache"},
}


def masses(cache: Any) -> Tensor:
    return torch.stack([layer.action.state.mass.max() for _, layer in cache.paged_layers])


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_what_it_is_alone(way: str) -> None:
    """Padded and in a batch, over a ragged second turn."""
    model = models.shared("llama", OURS)
    turns = None if way in ("merge", "values_ada_kv") else [10, 2, 6]
    assert rows.compare(model, [40, 33, 9], turns, **{**SMALL, **WAYS[way]}) > 0


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt_neox"])
def test_families(family: str) -> None:
    """Soft-capping, sinks, windows beside; as many query heads as KV heads."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family, OURS)
    assert rows.compare(model, [33, 9], None, **{**SMALL, **WAYS["values"]}) > 0


@pytest.mark.parametrize("way", ["merge", "values", "d2o"])
def test_unused_slots_do_not_matter(way: str) -> None:
    """NaN beyond what is held, huge numbers in pads."""
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([70, 50, 41], seed=6))
    mask[1, 33] = 0  # a pad in the middle
    logits = []
    for spoil in (False, True):
        cache = models.paged(model.config, **{**SMALL, **WAYS[way]})
        for span in [(0, 22), (22, 26), *((at, at + 1) for at in range(26, 50)), (50, 70)]:
            logits.append(modes.forward(model, cache, ids, mask, *span)[mask[:, slice(*span)].bool()])
            for _, layer in cache.paged_layers if spoil else ():
                poison_unused(layer)
        assert (masses(cache) > 1).all()
    half = len(logits) // 2
    assert torch.equal(torch.cat(logits[:half]), torch.cat(logits[half:]))


@pytest.mark.parametrize(
    ("way", "mode", "padded"),
    [
        ("merge", "beam", True),
        ("values", "beam", False),
        ("fixed", "assisted", False),
        ("d2o", "chunked_prefill", True),
        ("values_fixed", "three_turns", True),
        ("cache_positions", "direct", True),
    ],
)
def test_modes(way: str, mode: str, padded: bool) -> None:
    """They run, something is merged, and says something else than dropping."""
    model = models.shared("llama", OURS)
    inputs = modes.batch(mode, padded)
    settings = {**SMALL, **WAYS[way]}
    cache = models.paged(model.config, **settings)
    modes.run(model, cache, mode, *inputs)
    assert (masses(cache) > 1).all()
    before = cache.stats()
    assert before.summary_bytes > 0
    if mode not in modes.SPECULATIVE and way not in ("d2o",):
        cache.shrink(16)
        assert (masses(cache) > 1).all()
    dropping = models.paged(model.config, **{**settings, "disposal": "drop"})
    modes.run(model, dropping, mode, *inputs)
    assert dropping.stats().evicted_tokens == before.evicted_tokens > 0


def test_beams_are_what_their_rows_were() -> None:
    """What a row merged follows it, and twins go on apart."""
    model = models.shared("llama", OURS)
    for way in ("merge", "values"):
        cache = models.paged(model.config, **{**SMALL, **WAYS[way]})
        ids, mask = modes.batch("direct", True)
        modes.forward(model, cache, ids, mask, 0, 40)
        twin = copy.deepcopy(cache)
        index = torch.tensor([2, 0, 0])
        cache.reorder_cache(index)
        more = torch.stack(models.prompts([9] * 3, seed=7))
        logits = []
        for one, own_ids, own_mask, own in ((cache, ids[index], mask[index], more[index]), (twin, ids, mask, more)):
            text, real = torch.cat([own_ids, own], dim=1), modes.extend(own_mask, 9)
            chunks = [modes.forward(model, one, text, real, at, at + 1) for at in range(40, 49)]
            logits.append(torch.cat(chunks, dim=1))
        assert_close(logits[0], logits[1][index])


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
def test_counts_are_exact_for_equal_keys(policy: str) -> None:
    """Without positions, equal tokens have equal keys: a text of a few words is held whole in a few slots."""
    model = models.build("llama", OURS)
    model.model.rotary_emb.forward = _standing_still(model.config.head_dim)
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    words = torch.tensor([5, 9, 17, 23, 40, 41, 42])
    draw = torch.Generator().manual_seed(3)
    ids = words[torch.randint(7, (2, 70), generator=draw)]
    ids[:, 4:11] = words  # every word stands among those that stay
    ids[:, :4] = words[:4]
    mask = torch.ones_like(ids)
    spans = [(0, 40), *((at, at + 1) for at in range(40, 56)), (56, 64), *((at, at + 1) for at in range(64, 70))]
    logits = []
    for cache in (
        DynamicCache(config=model.config),
        models.paged(
            *(model.config, 24, 4),
            policy=policy,
            sink_tokens=11,
            disposal="merge(values_only=True, threshold=0.999)",
        ),
        models.paged(model.config, 24, 4, policy=policy, sink_tokens=11),
    ):
        logits.append(torch.cat([modes.forward(model, cache, ids, mask, *span) for span in spans], dim=1))
    assert_close(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 0.1, "dropping is not exact"


def _standing_still(width: int) -> Any:
    def rotary(states: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, width)
        return states.new_ones(shape), states.new_zeros(shape)

    return rotary


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_refused() -> None:
    ours = models.shared("llama", OURS)
    for options, message in [
        ({"disposal": "merge", "positions": "cache"}, "no position of its own"),
        ({"disposal": "merge(threshold=2)"}, "threshold"),
        ({"disposal": "merge(threshold=high)"}, "threshold"),
        ({"disposal": "merge(values_only=3)"}, "values_only must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            models.paged(ours.config, 24, 4, **options)
    assert make_disposal("merge(values_only=True, threshold=0.9)") == Merge(True, 0.9)
    assert Merge(True, 0.9).label == "merge(values_only=True, threshold=0.9)"

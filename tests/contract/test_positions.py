"""`positions="cache"`: what stays the same, what it costs, what policies see; tests/fuzz compares logits."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from evicting import binding
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries import observer

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("mode", ["greedy", "direct", "prompt_lookup"])
def test_nothing_changes_while_everything_is_held(mode: str) -> None:
    model = models.shared("llama")
    ids, mask = modes.batch(mode, padded=mode != "prompt_lookup")
    cache = binding(model, mode, budget=120, positions="cache")
    sequences = modes.run(model, cache, mode, ids, mask)
    assert torch.equal(sequences, modes.run(model, modes.dynamic(model), mode, ids, mask))
    plain = binding(model, mode, budget=120)
    modes.run(model, plain, mode, ids, mask)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        held = layer.held
        assert torch.equal(layer.store.shown(held)[0], other.keys[:, :, :held])
        assert layer.store.columns.bytes == other.store.columns.bytes


def test_what_a_copy_costs() -> None:
    """Keys are held twice once something was evicted, values once."""
    sizes = []
    for positions in ("text", "cache"):
        cache = PagedEvictionCache(models.shared("llama").config, budget=24, block_size=4, positions=positions)
        modes.forward(models.shared("llama"), cache, *modes.batch("greedy", False), 0, 40)
        sizes.append(cache.stats().storage_bytes)
    assert sizes[1] == 1.5 * sizes[0]


def test_policies_see_the_attention_that_was_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are worked out later for a whole block are those of each step, with the keys where they stood."""
    model = models.shared("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy="h2o", positions="cache")
    layer = cache.layers[0]
    paid: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by position: query, keys, positions of the keys
    own, attended, with_kept, compared = layer.recorder.observer, layer.attended, observer._with_kept, []

    def note(queries: Any) -> None:
        if queries.query.shape[2] == 1:
            at = layer.get_seq_length() - 1
            paid[at] = queries.query.clone(), queries.key.clone(), layer.positions.clone()
        attended(queries)

    def look(observers: Any, statistics: Any, key: Tensor, positions: Tensor, seen: Tensor, *rest: Tensor) -> Any:
        row = observers.index(own) if own in observers else None  # layers stand one behind the other
        for at in () if row is None else range(int(seen[row]) - 4, int(seen[row])):
            query, keys, held = paid[at]
            for head in range(2):
                there = [slot for slot, p in enumerate(positions[row, head].tolist()) if 0 <= p <= at]
                slots = [held[0, head].tolist().index(positions[row, head, slot]) for slot in there]
                before = query[0, 2 * head] @ keys[0, head, slots].T
                now = query[0, 2 * head] @ key[row, head, there].T
                compared.append(float((before - now).abs().max()))
        return with_kept(observers, statistics, key, positions, seen, *rest)

    layer.attended = note
    monkeypatch.setattr(observer, "_with_kept", look)
    ids = models.prompts([60])[0][None]
    feed = partial(modes.forward, model, cache, ids, torch.ones_like(ids))
    feed(0, 28)
    for at in range(28, 60):
        feed(at, at + 1)
    assert len(compared) == 8 * 4 * 2
    assert max(compared) == 0
    assert layer.shifts.amax() > 20


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"bits": 4}, 'positions="cache".*use'),
        ("deepseek_v3", {"policy": "keydiff"}, 'positions="cache".*use'),
        ("gpt2", {}, "no layer that evicts rotates.*"),
    ],
)
def test_what_does_not_go_together(family: str, settings: dict[str, Any], reason: str) -> None:
    if unavailable := models.unavailable(family):
        pytest.skip(unavailable)
    with pytest.raises(ValueError, match=f'{reason} positions="text"'):
        PagedEvictionCache(models.shared(family).config, budget=24, block_size=4, positions="cache", **settings)

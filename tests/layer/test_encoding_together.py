"""Layers make the codes of a block at once: the same codes, in fewer operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

import models
from counted import Operators
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.layer.scores import encode
from hf_paged_eviction.precision.codec import Codec
from hf_paged_eviction.store.store import Store


def waiting(layers: int, **settings: Any) -> PagedEvictionCache:
    """A cache whose layers hold other tokens each, five of which have no codes yet; one row has pads."""
    model = models.build("llama", num_hidden_layers=layers)
    _, mask = models.left_pad(models.prompts([40, 25], seed=3))
    settings = {"policy": "keydiff", "budget": 24, "block_size": 8, "bits": 4, **settings}
    cache = PagedEvictionCache(model.config, attention_mask=mask, **settings)
    torch.manual_seed(0)
    for count in (40, *[1] * 5):
        feed(cache, range(layers), count)
    return cache


def feed(cache: PagedEvictionCache, layers: Iterable[int], count: int) -> None:
    """Random keys and values of so many tokens."""
    cache.get_mask_sizes(count, 0)
    for layer in layers:
        cache.layers[layer].update(*torch.randn(2, 2, 2, count, 8))


def codes(cache: PagedEvictionCache) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = []
    for _, layer in cache.paged_layers:
        assert layer.store.rounds and layer.store.uncoded == 0
        parts += [*layer.store.tensors, *layer.store.exact.tensors(), layer.table.scores]
    return parts


@pytest.mark.parametrize(
    "settings", [{}, {"policy": "keydiff", "heads": "separate"}, {"policy": "paged_eviction"}], ids=str
)
def test_codes_are_the_same(settings: dict[str, Any]) -> None:
    alone, together = waiting(3, **settings), waiting(3, **settings)
    for _, layer in alone.paged_layers:
        encode(layer.state)
    encode(*[layer.state for _, layer in together.paged_layers])
    for ours, expected in zip(codes(together), codes(alone), strict=True):
        assert torch.equal(ours, expected)


def test_more_layers_take_few_operators_more() -> None:
    counts = []
    for layers in (1, 2, 3):
        cache = waiting(layers)
        with Operators() as operators:
            encode(*[layer.state for _, layer in cache.paged_layers])
        counts.append(operators.count)
    first, second, third = counts
    assert third - second < 0.6 * first


def test_the_last_layer_makes_the_codes_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager steps. Where a forward has failed, a layer makes its own before it needs the place."""
    made: list[int] = []
    original = Store.encode

    def noted(self: Store, together: Sequence[Store] = ()) -> Any:
        made.append(1 + len(together))
        return original(self, together)

    monkeypatch.setattr(Store, "encode", noted)
    cache = waiting(3)
    for _ in range(2):
        feed(cache, range(3), 1)
    assert made == []
    feed(cache, range(3), 1)
    assert made == [3]
    for _ in range(8):
        feed(cache, range(2), 1)
    assert made == [3, 2]
    feed(cache, range(3), 1)
    for _ in range(8):
        feed(cache, [0], 1)
    assert made == [3, 2, 1] and cache.layers[0].store.uncoded == 1


def test_codecs_of_another_package_encode_alone() -> None:
    """They may know something of their layer."""

    class Other(Codec):
        pass

    assert Codec(4, True).alike(Codec(4, True)) and not Codec(4, True).alike(Codec(2, True))
    other = Other(4, True)
    assert other.alike(other) and not other.alike(Other(4, True)) and not Codec(4, True).alike(other)

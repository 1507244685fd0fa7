"""Attention in pages is attention, whatever the model makes of its logits."""

import math
from math import inf
from typing import Any

import pytest
import torch

import driving
from driving import alone, batching, model_of, pool, texts
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction_serving import stock_pages, stock_step
from hf_paged_eviction_serving.attention import compare
from hf_paged_eviction_serving.options import ServingOptions
from hf_paged_eviction_serving.stock_step import size_classes


def slow(query: Any, key: Any, value: Any, mask: Any, logits: Logits) -> Any:
    """One query after the other."""
    output = torch.zeros_like(query)
    rows, query_heads, count, _ = query.shape
    shape = (rows, key.shape[1], count, key.shape[2])
    seen = torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
    for row in range(rows):
        for head in range(query_heads):
            shared = head * key.shape[1] // query_heads
            for at in range(count):
                products = key[row, shared] @ query[row, head, at] * logits.scaling
                if logits.softcap is not None:
                    products = logits.softcap * torch.tanh(products / logits.softcap)
                weights = products.exp() * seen[row, shared, at]
                whole = weights.sum() + (0.0 if logits.sinks is None else math.exp(logits.sinks[head]))
                output[row, head, at] = weights / whole @ value[row, shared]
    return output


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("masked", [None, "heads", "shared", "rows"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("groups", [1, 3])
def test_as_slow(softcap: float | None, sinks: bool, masked: str | None, rows: int, count: int, groups: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(rows, 2 * groups, count, 8)
    key, value = torch.randn(2, rows, 2, 7, 8)
    shape = {"heads": (rows, 2, count, 7), "shared": (rows, 1, count, 7), "rows": (rows, 1, 1, 7)}
    mask = None if masked is None else torch.rand(shape[masked]) < 0.6
    if mask is not None:
        mask[..., 0] = True
    logits = Logits(0.7, softcap, torch.randn(2 * groups) if sinks else None)
    torch.testing.assert_close(compare(query, key, value, mask, logits), slow(query, key, value, mask, logits))


SIZES = {"budget": 32, "block_size": 4}


def loaded(family: str) -> Any:
    """The experts of gpt_oss have no kernel in float64."""
    return driving.models.shared(family) if family == "gpt_oss" else model_of(family)


def assert_as_alone(model: Any, **options: Any) -> None:
    """Several requests at once get the answers that they get alone."""
    requests = list(zip(texts((21, 33, 70)), (14, 6, 10), strict=True))
    with batching(model, pool(12), **options) as turned:
        for at, (prompt, new) in enumerate(requests):
            turned.add(str(at), prompt, new)
        turned.run()
    for at, (prompt, new) in enumerate(requests):
        assert turned.answers[str(at)] == alone(model, prompt, new, **options)


@pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)
@pytest.mark.parametrize("policy", ["keydiff", "h2o", "snapkv"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_as_alone(family: str, policy: str) -> None:
    """Soft caps, and sinks."""
    assert_as_alone(loaded(family), **SIZES, policy=policy)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_causal(softcap: float | None, sinks: bool) -> None:
    torch.manual_seed(0)
    query, (key, value) = torch.randn(1, 6, 5, 8), torch.randn(2, 1, 2, 5, 8)
    logits = Logits(0.7, softcap, torch.randn(6) if sinks else None)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    output = compare(query, key, value, None, logits, causal=True)
    torch.testing.assert_close(output, slow(query, key, value, mask, logits))


@pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_groups_of_sets_as_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that hold different numbers of tokens are read apart where that is worth it, here always."""
    monkeypatch.setattr(stock_pages, "_WORTH_A_GROUP", 1)
    groups = []
    monkeypatch.setattr(
        stock_step, "size_classes", lambda *arguments: groups.append(size_classes(*arguments)) or groups[-1]
    )
    model = loaded(family)
    layers = ServingOptions(model.config, **SIZES, policy="keydiff").layers
    assert_as_alone(model, **SIZES, policy="keydiff", allocator=Heads.of([[0.3, 1.7]] * len(layers)))
    assert {len(sizes) for sizes in groups} == {1, 2}


def read(groups: list[list[int]], widths: tuple[int, ...]) -> int:
    """Tokens that are read of sets in these groups."""
    return sum(len(group) * max(widths[place] for place in group) for group in groups)


@pytest.mark.parametrize("least", [1, 30, 100, 1000, inf])
@pytest.mark.parametrize("widths", [(7, 7, 7), (4, 100, 60, 9, 50, 5), (600, 500, *[100] * 6), (48, 528, 176), (9,)])
def test_size_classes(widths: tuple[int, ...], least: float) -> None:
    """Each set is in one, and each group but the first saves that much."""
    groups = size_classes(widths, least)
    assert sorted(place for group in groups for place in group) == [*range(len(widths))]
    if len(groups) > 1:
        assert read([[*range(len(widths))]], widths) - read(groups, widths) >= least * (len(groups) - 1)
    for group in groups:  # no further split is worth it
        for width in {widths[place] for place in group}:
            halves = [[at for at in group if widths[at] > width], [at for at in group if widths[at] <= width]]
            assert read([group], widths) - read([half for half in halves if half], widths) < least


def test_equal_sets_are_one_group() -> None:
    assert size_classes([7, 7, 7], 1) == [[0, 1, 2]]
    assert size_classes([4, 100, 60, 9, 50, 5], inf) == [[0, 1, 2, 3, 4, 5]]
    assert size_classes([4, 100, 60, 9, 50, 5], 1000) == [[0, 1, 2, 3, 4, 5]]
    assert size_classes([4, 100, 60, 9, 50, 5], 100) == [[1, 2, 4], [3, 5, 0]]

"""Budget allocators: shares add up, follow their formula, and are refused where they cannot work."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import (
    BudgetAllocator,
    Heads,
    Uniform,
    available_allocators,
    make_allocator,
    register_allocator,
    share_out,
)
from hf_paged_eviction.allocators.ada_kv import AdaKV
from hf_paged_eviction.allocators.cake import Cake
from hf_paged_eviction.allocators.d2o import D2O
from hf_paged_eviction.allocators.limits import Limits
from hf_paged_eviction.allocators.pyramid import Pyramid
from hf_paged_eviction.attention.weights import Attention, Logits
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.queries.attention import PAGED_EVICTION


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=12),
    least=st.integers(1, 5),
    spare=st.integers(0, 200),
    most=st.none() | st.integers(0, 60),
)
def test_shares_add_up(weights: list[float], least: int, spare: int, most: int | None) -> None:
    total = least * len(weights) + spare
    shares = share_out(torch.tensor([weights]), total, least, None if most is None else torch.tensor([most]))[0]
    assert shares.sum() == total
    assert shares.min() >= min(least, total // len(weights))
    by_weight = sorted(zip(weights, shares.tolist(), strict=True))
    assert all(heavy - light >= -1 for (_, light), (_, heavy) in itertools.pairwise(by_weight))


def exact_shares(weights: list[float], total: int, least: int, most: int) -> list[int]:
    """Shares worked out with fractions: the factor is tried at every share's bounds, and taken in between."""
    count = len(weights)
    if most * count <= total:
        quota = [Fraction(total, count)] * count
    else:
        most = max(most, least)
        exact = [Fraction(weight) for weight in (weights if sum(weights) > 0 else [1.0] * count)]
        bends = sorted({Fraction(bound) / weight for weight in exact if weight for bound in (least, most)})
        at = [[min(max(weight * factor, Fraction(least)), Fraction(most)) for weight in exact] for factor in bends]
        lines = [[Fraction(least)] * count, *at, [Fraction(most)] * count]
        first, last = next(pair for pair in itertools.pairwise(lines) if sum(pair[0]) <= total < sum(pair[1]))
        way = (total - sum(first)) / (sum(last) - sum(first))
        quota = [low + way * (high - low) for low, high in zip(first, last, strict=True)]
    noise = Fraction(1, 10**9)  # of the sums in float64: remainders that differ by less are equal
    whole = [int(share + noise) for share in quota]
    levels = [round((share - count) / noise) for share, count in zip(quota, whole, strict=True)]
    for place in sorted(range(count), key=lambda place: (-levels[place], place))[: total - sum(whole)]:
        whole[place] += 1
    return whole


@given(
    weights=st.lists(st.integers(0, 6).map(float) | st.floats(1e-3, 1e3), min_size=1, max_size=12),
    least=st.integers(0, 5),
    spare=st.integers(1, 200),
    most=st.none() | st.integers(1, 60),
)
@example(weights=[1.0, 1.0, 2.0, 2.0, 2.9000000000000004, 3.8, 0.8], least=4, spare=62, most=None)
def test_shares_are_those_of_exact_numbers(weights: list[float], least: int, spare: int, most: int | None) -> None:
    """Ties included: the first of equal remainders gets the block."""
    total = least * len(weights) + spare
    limits = None if most is None else torch.tensor([most])
    shares = share_out(torch.tensor([weights], dtype=torch.float64), total, least, limits)
    assert shares.tolist() == [exact_shares(weights, total, least, total if most is None else most)]


def test_pyramid_is_the_papers() -> None:
    """Linear from `2 (C - w) - (C - w) / beta` down to `(C - w) / beta`, beside the window."""
    budget, layers, beta, window = 512, 8, 20, 8
    low = (budget - window) / beta
    high = 2 * (budget - window) - low
    expected = [window + high - layer * (high - low) / (layers - 1) for layer in range(layers)]
    weights = Pyramid().weights(layers, budget)
    assert weights == pytest.approx(expected)
    assert sum(weights) == pytest.approx(budget * layers)
    assert Pyramid(beta=1).weights(4, 64) == pytest.approx([64] * 4)
    assert Pyramid().weights(1, 64) == [1.0]


def attention(rows: int = 2, queries: int = 6, tokens: int = 9) -> Attention:
    """Random attention of the last queries; row 1 starts with two pads."""
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(tokens) - 2 * torch.arange(rows)[:, None]
    positions = positions.masked_fill(positions < 0, -1)
    return Attention(
        torch.randn(rows, 4, queries, 5, generator=generator),
        torch.randn(rows, 2, tokens, 5, generator=generator),
        positions[:, -queries:],
        positions[:, None].expand(-1, 2, -1),
        Logits(5**-0.5),
    )


def watched(allocator: Cake | D2O, inputs: Attention) -> torch.Tensor:
    """Preferences, the queries shown one by one."""
    statistics = {name: torch.zeros(()) for name in allocator.token_statistics}
    for at in range(inputs.queries.shape[2]):
        queries, positions = inputs.queries[:, :, at : at + 1], inputs.query_positions[:, at : at + 1]
        statistics = allocator.observe(statistics, replace(inputs, queries=queries, query_positions=positions))
    return allocator.preference(statistics, inputs.key_positions)


def test_cake_is_entropy_times_variance() -> None:
    """Of the tokens before the window of six queries."""
    inputs = attention()
    allocator = Cake(tau1=1.3, tau2=0.7, observed=6)
    weights = inputs.weights
    for row, preference in enumerate(watched(allocator, inputs).tolist()):
        entropy = spread = 0.0
        for head, group, token in itertools.product(range(2), range(2), range(2 * row, 3)):
            pays = weights[row, head, group, :, token].tolist()
            spread += statistics.pvariance(pays)
            entropy -= sum(pay * math.log(pay) for pay in pays)
        assert preference == pytest.approx(entropy ** (1 / 1.3) * spread ** (1 / 0.7), rel=1e-3)


def test_cake_shares_out_what_is_beside_the_window() -> None:
    weights = Cake(observed=8).weights(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), 24)
    assert weights.tolist() == [[8 + 8, 8 + 24], [8, 8]]
    assert Cake(observed=8).weights(torch.tensor([[1.0, 3.0]]), 6).tolist() == [[6, 6]]


def test_d2o_is_the_variance_of_received_attention() -> None:
    """Per query head, scaled over the heads."""
    inputs = attention()
    preferences = watched(D2O(), inputs)
    for row in range(2):
        received = inputs.weights[row].sum(2).flatten(0, 1)[:, 2 * row :].tolist()
        variances = [statistics.variance(head) for head in received]
        low, high = min(variances), max(variances)
        scaled = [(value - low) / (high - low + 1e-6) for value in variances]
        assert preferences[row].item() == pytest.approx(sum(scaled) / len(scaled), rel=1e-4)
    weights = D2O().weights(torch.tensor([[0.1, 0.3]]), 64)
    assert weights[0, 0] / weights[0, 1] == pytest.approx(math.exp(0.2))


def test_ada_kv_counts_the_best_of_the_layer() -> None:
    scores = torch.tensor([[[9.0, 8.0, 7.0, 1.0], [6.0, 0.0, 0.0, -math.inf]]])
    assert AdaKV(floor=0.0).weights(scores, 2).tolist() == [[3.0, 1.0]]
    assert AdaKV(floor=0.5).weights(scores, 2).tolist() == [[2.5, 1.5]]
    assert AdaKV(floor=1.0).weights(scores, 2).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pyramid(beta=0.5), r"beta.*1"),
        (lambda: Pyramid(window=-1), r"window.*0"),
        (lambda: Cake(tau1=0), r"tau1.*0"),
        (lambda: Cake(observed=1), r"whole.*2"),
        (lambda: AdaKV(floor=2), r"floor.*0.*1"),
    ],
)
def test_wrong_parameters(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_registry() -> None:
    assert available_allocators() == ("ada_kv", "cake", "d2o", "first_prompt", "heads", "pyramid", "uniform")
    assert make_allocator("pyramid") == Pyramid()
    assert make_allocator(Pyramid(beta=3)).beta == 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Unknown allocator 'piramid'"):
        make_allocator("piramid")
    with pytest.raises(TypeError, match="not a class"):
        make_allocator(Pyramid)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'pyramid' is taken"):
        register_allocator("pyramid")(AdaKV)
    assert AdaKV.name == "ada_kv"


@pytest.mark.parametrize(
    ("text", "allocator"),
    [
        ("ada_kv(floor=0.5)", AdaKV(floor=0.5)),
        ("cake(tau1=2.0, observed=8)", Cake(tau1=2.0, observed=8)),
        ("pyramid(beta=3)", Pyramid(beta=3)),
        ("uniform", Uniform()),
    ],
)
def test_text_and_object_are_the_same(text: str, allocator: BudgetAllocator) -> None:
    assert make_allocator(text) == make_allocator(f" {text} ") == allocator
    assert allocator.label == str(allocator) == text
    assert make_allocator(f"{allocator.name}()") == type(allocator)()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("piramid", r"'piramid'.*'pyramid'\?"),
        ("piramid(beta=3)", "Unknown allocator 'piramid'"),
        (
            "pyramid(bta=3)",
            "parameter",
        ),
        ("uniform(floor=1)", "It has no parameters"),
        ("ada_kv(0.5)", r"floor=0.5"),
        ("ada_kv(cake)", "8: ada_kv"),
        ("ada_kv(floor=2)", r"floor.*0.*1"),
        ("ada_kv(floor=half)", "'half'"),
        ("cake(observed=2.5)", r"observed.*whole"),
        ("ada_kv(floor=0.5", r"'ada_kv\(floor=0.5'.*7"),
    ],
)
def test_mistakes_are_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_allocator(text)


def test_an_allocator_with_parameters_works_where_a_name_does() -> None:
    model = models.shared("llama", PAGED_EVICTION)
    sizes = []
    for allocator in ("pyramid", "pyramid(beta=4)", Pyramid(beta=4)):
        cache = PagedEvictionCache(model.config, 64, 4, "paged_eviction", allocator=allocator)
        model(models.prompts([140])[0][None], **{CACHE_ARGUMENT: cache})
        sizes.append([layer.budget.capacity for _, layer in cache.paged_layers])
    assert sizes[0] != sizes[1] == sizes[2]
    assert sum(sizes[0]) == sum(sizes[1]) == 128


def test_refusals() -> None:
    plain, ours = models.shared("llama"), models.shared("llama", "paged_eviction")
    with pytest.raises(ValueError, match=r"allocator 'pyramid'.*uses 'sdpa'[\s\S]*set_attn_implementation"):
        PagedEvictionCache(plain.config, budget=64, allocator="pyramid")
    with pytest.raises(ValueError, match='use heads="separate"'):
        PagedEvictionCache(ours.config, budget=64, allocator="ada_kv", heads="shared")
    with pytest.raises(ValueError, match="budget="):
        PagedEvictionCache(ours.config, budget="50%", allocator="cake")


@pytest.mark.parametrize(("family", "heads"), [("llama", "shared"), ("llama", "separate"), ("deepseek_v3", "shared")])
def test_a_table_of_layers(family: str, heads: str) -> None:
    """One number for each layer: heads may be shared, and latents have none."""
    model = models.shared(family, "paged_eviction")
    allocator = Heads.of([[3.0], [1.0]])
    settings = {"budget": 32, "block_size": 4, "policy": "keydiff"}
    cache = models.paged(model.config, **settings, heads=heads, allocator=allocator)
    ids, mask = models.left_pad(models.prompts([100, 60]))
    modes.forward(model, cache, ids, mask, 0, 100)
    assert [(layer.positions >= 0).sum(-1).unique().tolist() for _, layer in cache.paged_layers] == [[48], [16]]
    with pytest.raises(ValueError, match=r'heads="separate"|latents'):
        models.paged(model.config, budget=32, block_size=4, allocator=Heads.of([[3.0, 1.0]] * 2), heads="shared")


@pytest.mark.parametrize("name", ["first_prompt(distance=2)", "cake(observed=8)"])
def test_layers_are_compared_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a prompt overflows, its shares are decided once, for all layers."""
    decided, settle = [], Limits.settle

    def count(limits: Limits, real: torch.Tensor) -> None:
        decided.append(real.tolist())
        settle(limits, real)

    monkeypatch.setattr(Limits, "settle", count)
    model = models.shared("llama", PAGED_EVICTION)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy="snapkv(window=4)", allocator=name)
    with torch.no_grad():
        model(torch.randint(0, 64, (2, 40)), attention_mask=torch.ones(2, 40), **{CACHE_ARGUMENT: cache})
    assert decided == [[40, 40]]

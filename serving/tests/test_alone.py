"""A request gives the tokens that it gives alone, whatever runs beside it."""

from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

import driving
import models
from driving import Batching, alone, batching, greedy, held_alone, model_of, pool, texts
from hf_paged_eviction.precision import native
from hf_paged_eviction_serving import paged_batching

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

LENGTHS = (19, 33, 70, 1, 48, 17)
NEW = (16, 9, 10, 34, 3, 1)
OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4, "policy": "keydiff"}


def adding(name: str, prompt: list[int], new: int) -> Any:
    return lambda turned: turned.add(name, prompt, new)


def cancelling(name: str) -> Any:
    return lambda turned: turned.manager.cancel_request(name)


def run(options: dict[str, Any], config: Any, arrivals: list[int], cancels: dict[int, int]) -> Batching:
    """All requests, each arriving before its step; `cancels` says which are given up before which step."""
    schedule: dict[int, list[Any]] = {}
    for index, prompt in enumerate(texts(LENGTHS)):
        schedule.setdefault(arrivals[index], []).append(adding(str(index), prompt, NEW[index]))
    for index, step in cancels.items():
        schedule.setdefault(step, []).append(cancelling(str(index)))
    with batching(model_of(), config, **options) as turned:
        pages = turned.free
        turned.run(schedule)
        assert turned.free == pages
        assert not turned.bounded.requests
    return turned


def differing(turned: Batching, options: dict[str, Any]) -> list[str]:
    expected = [alone(model_of(), prompt, new, **options) for prompt, new in zip(texts(LENGTHS), NEW, strict=True)]
    return [name for name, tokens in turned.answers.items() if tokens != expected[int(name)]]


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(
    arrivals=st.lists(st.integers(0, 20), min_size=len(LENGTHS), max_size=len(LENGTHS)),
    pages=st.integers(2, 14),
    page_size=st.sampled_from([4, 16, 32]),
    tokens=st.integers(16, 48),
    cancels=st.dictionaries(st.integers(0, len(LENGTHS) - 1), st.integers(0, 45), max_size=2),
    more=st.sampled_from([{}, {"bits": 4}, {"bits": (8, 3), "policy": "paged_eviction"}]),
)
def test_any_schedule(
    arrivals: list[int], pages: int, page_size: int, tokens: int, cancels: dict[int, int], more: dict[str, Any]
) -> None:
    config, options = pool(max(pages, -(-32 // page_size)), page_size, tokens), OPTIONS | more
    turned = run(options, config, arrivals, cancels)
    assert not differing(turned, options)
    assert set(turned.answers) >= {str(index) for index in range(len(LENGTHS)) if index not in cancels}


@pytest.mark.parametrize(("policy", "chunk"), [("paged_eviction", 16), ("lagkv", 5), ("random", 48)])
def test_policies(policy: str, chunk: int) -> None:
    """Policies on keys and values, on all tokens together, on positions and layers; chunks beyond the budget, too."""
    options = OPTIONS | {"policy": policy, "sink_tokens": 9, "recent_tokens": 10, "prefill_chunk_size": chunk}
    turned = run(options, pool(8, tokens=chunk + 4), [0, 0, 3, 4, 11, 20], {})
    assert not differing(turned, options)
    assert len(turned.answers) == len(LENGTHS)


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("policy", ["keydiff", "paged_eviction", "tova"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_codes_are_read_in_c(policy: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32: where they lie in pages, with sets of one length and of several."""
    model, prompts, reads, launch = models.build(family), texts([40, 17, 70]), [], native.launch
    options = OPTIONS | {"policy": policy, "bits": 4, "heads": "separate"}
    expected = [alone(model, prompt, 12, **options) for prompt in prompts]
    monkeypatch.setattr(native, "launch", lambda *given: reads.append(given[14:]) or launch(*given))
    with batching(model, pool(16), **options) as turned:
        turned.run({0: [adding("0", prompts[0], 12), adding("1", prompts[1], 12)], 5: [adding("2", prompts[2], 12)]})
    assert [turned.answers[str(index)] for index in range(3)] == expected
    assert reads and all(records is not None for (records,) in reads)


@pytest.mark.parametrize("bits", [4, 2])
def test_bits_are_not_without_effect(bits: int) -> None:
    """The control: other answers than without, and pages that hold more tokens."""
    options = OPTIONS | {"bits": bits}
    with batching(model_of(), pool(8), **options) as turned:
        turned.run({0: [adding(str(at), prompt, 34) for at, prompt in enumerate(texts(LENGTHS))]})
        assert turned.bounded.page_tokens > 16
        assert set(turned.most_pages.values()) == {1}
    plain = [alone(model_of(), prompt, 34, **OPTIONS) for prompt in texts(LENGTHS)]
    assert [turned.answers[str(at)] for at in range(len(LENGTHS))] != plain


class StockScheduler(FIFOScheduler):
    """Cuts as transformers does."""

    def __init__(self, stock: Any, bounded: Any, *_: Any) -> None:
        super().__init__(stock.cache, stock.safety_margin, stock.max_requests_per_batch)
        self.bounded = bounded


def test_stock_scheduler_depends_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where prompts are cut wherever a batch is full, answers change."""
    monkeypatch.setattr("hf_paged_eviction_serving.manager.FixedCutScheduler", StockScheduler)
    with batching(model_of(), pool(16), **OPTIONS) as turned:
        turned.run({0: [adding(str(at), text, NEW[at]) for at, text in enumerate(texts(LENGTHS))]})
    assert len(turned.answers) == len(LENGTHS)
    assert differing(turned, OPTIONS)


@pytest.mark.parametrize(("family", "attention"), [("gemma3", "sdpa"), ("gemma3", "eager"), ("gpt_neox", "eager")])
def test_models(family: str, attention: str) -> None:
    """Layers with a sliding window stay transformers' own; the others evict."""
    if family == "gpt_neox" and transformers.__version__ == "5.24.0":
        pytest.skip("refused, see test_refused.py")
    model, options = model_of(family), OPTIONS | {"budget": 24}
    prompts = texts([30, 17, 50])
    model.set_attn_implementation(attention)
    try:
        expected = [alone(model, prompt, 12, **options) for prompt in prompts]
        with batching(model, pool(16, 8), **options) as turned:
            turned.run(
                {0: [adding("0", prompts[0], 12), adding("1", prompts[1], 12)], 5: [adding("2", prompts[2], 12)]}
            )
    finally:
        model.set_attn_implementation("sdpa")
    assert [turned.answers[str(index)] for index in range(3)] == expected


def test_large_budget_is_stock() -> None:
    """A budget that holds everything gives what `generate_batch` gives without eviction."""
    model, prompts = model_of(), texts(LENGTHS)
    config = pool(30, tokens=64)
    stock = model.generate_batch(prompts, generation_config=greedy(12), continuous_batching_config=config)
    with paged_batching(model, budget=128, prefill_chunk_size=32):
        ours = model.generate_batch(
            prompts, generation_config=greedy(12), continuous_batching_config=pool(8 * 8, tokens=64)
        )
    with paged_batching(model, budget=48, prefill_chunk_size=32):
        less = model.generate_batch(
            prompts, generation_config=greedy(12), continuous_batching_config=pool(30, tokens=64)
        )
    tokens = [[output.generated_tokens for output in outputs.values()] for outputs in (stock, ours, less)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]  # the control: a small budget is not without effect


@pytest.mark.parametrize(("policy", "recent"), [("keydiff", 9), ("paged_eviction", 1), ("value_norm", 9)])
def test_victims_are_the_same(policy: str, recent: int) -> None:
    """Not the tokens alone: every layer holds the same positions as `PagedEvictionCache`, in the same slots."""
    model, prompt, options = model_of(), texts([70])[0], OPTIONS | {"policy": policy, "recent_tokens": recent}
    _, cache = held_alone(model, prompt, 36, **options)
    expected = [layer.table.positions[0].tolist() for _, layer in cache.paged_layers]
    with batching(model, pool(8), **options) as turned:
        turned.add("1", texts([40], seed=1)[0], 46)
        turned.add("0", prompt, 36)
        held = turned.last_held("0")
    assert held == expected
    assert len(held[0]) == (2 if policy == "value_norm" else 1)
    assert held[0] != held[1]  # layers differ


def test_children() -> None:
    """Several answers per prompt: each is a request of its own, cut as one alone."""
    model, prompts = model_of(), texts([40, 9])
    config = greedy(10)
    config.num_return_sequences = 3  # which transformers would not let a greedy configuration say
    with paged_batching(model, prefill_chunk_size=driving.CHUNK, **OPTIONS):
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=pool(9))
    expected = [alone(model, prompt, 10, **OPTIONS) for prompt in prompts for _ in range(3)]
    assert [output.generated_tokens for output in outputs.values()] == expected

"""Requests that go on from a saved cache give what that cache gives alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import driving
from driving import answer, batching, feed, greedy, model_of, pool, texts
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.queries.attention import PAGED_EVICTION

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4, "policy": "keydiff"}
QUESTIONS = texts([1, 7, 20, 45], seed=3)


def read(text: list[int], **changes: Any) -> PagedEvictionCache:
    """A text in a cache, 16 tokens at a time."""
    cache = PagedEvictionCache(model_of().config, **(OPTIONS | changes))
    feed(model_of(), cache, text)
    return cache


@pytest.fixture
def shown() -> Iterator[None]:
    """The model shows its queries to caches."""
    model_of().set_attn_implementation(PAGED_EVICTION)
    yield
    model_of().set_attn_implementation("sdpa")


@pytest.mark.each_value_once
@pytest.mark.parametrize("length", [12, 32, 70, 67])
@pytest.mark.parametrize("decoded", [0, 6])
@pytest.mark.parametrize(
    "changes",
    [
        {"heads": "shared"},
        {"heads": "separate"},
        {"allocator": Heads.of([[0.3, 1.7], [1.4, 0.6]])},
        {"policy": "h2o"},
        {"policy": "tova"},
        {"policy": "snapkv(window=3)", "allocator": Heads.of([[0.3, 1.7], [1.4, 0.6]])},
        {"policy": "paged_eviction", "bits": 4},
        {"policy": "value_norm", "bits": (4, 2), "allocator": Heads.of([[0.3, 1.7], [1.4, 0.6]])},
        {"policy": "h2o", "bits": 3},
    ],
)
@pytest.mark.usefixtures("shown")
def test_same_as_alone(tmp_path: Path, length: int, decoded: int, changes: dict[str, Any]) -> None:
    """Short texts and long ones, in the middle of a block too; all questions at once, each with its own pages."""
    file, cache = tmp_path / "context", read(texts([length])[0], **changes)
    for token in texts([decoded], seed=9)[0] if decoded else []:
        feed(model_of(), cache, [token])
    cache.save(file)
    options = OPTIONS | changes
    loaded = PagedEvictionCache.load(file, model_of().config)
    with batching(model_of(), pool(8), **options) as turned:
        context = running(turned).context(loaded)
        for at, question in enumerate(QUESTIONS):
            turned.add(str(at), question, 6, context=context)
        turned.add("other", QUESTIONS[2], 6)
        turned.run()
        assert turned.free == 8
    for at, question in enumerate(QUESTIONS):
        cache = PagedEvictionCache.load(file, model_of().config)
        assert turned.answers[str(at)] == answer(model_of(), cache, question, 6), at
    assert turned.answers["other"] == driving.alone(model_of(), QUESTIONS[2], 6, **options)
    assert turned.answers["other"] != turned.answers["2"]


@pytest.mark.parametrize("policy", ["keydiff", "paged_eviction"])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_few_bits_within_the_first_block(tmp_path: Path, tokens: int, policy: str) -> None:
    """A text of few single tokens: its mean is taken with the first question, or when its block is full."""
    options = OPTIONS | {"policy": policy, "bits": 4}
    file, cache = tmp_path / "context", PagedEvictionCache(model_of().config, **options)
    for token in texts([tokens], seed=9)[0]:
        feed(model_of(), cache, [token])
    assert int(cache.layers[0].store.exact.coded) == (4 if tokens == 4 else -1)
    cache.save(file)
    questions = [*QUESTIONS, texts([2], seed=5)[0]]
    with batching(model_of(), pool(8), **options) as turned:
        context = running(turned).context(PagedEvictionCache.load(file, model_of().config))
        assert context.coded == (4 if tokens == 4 else 0)
        for at, question in enumerate(questions):
            turned.add(str(at), question, 9, context=context)
        turned.run()
    for at, question in enumerate(questions):
        cache = PagedEvictionCache.load(file, model_of().config)
        assert turned.answers[str(at)] == answer(model_of(), cache, question, 9), at


def running(turned: Any) -> Any:
    """The object that `paged_batching` has handed out."""
    return vars(turned.manager.model)["init_continuous_batching"].__self__


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"budget": 64}, "made with budget=64"),
        ({"block_size": 8}, "block_size=8"),
        ({"sink_tokens": 8}, "prefix of 8"),
        ({"policy": "key_norm"}, "policy 'key_norm'"),
        ({"heads": "separate"}, "heads='separate', not 'shared'"),
        ({"bits": 4}, r"bits=\(4, 4\)"),
    ],
)
def test_refused(changes: dict[str, Any], reason: str) -> None:
    cache = read(texts([40])[0], **changes)
    with batching(model_of(), pool(8), **OPTIONS) as turned, pytest.raises(ValueError, match=reason):
        running(turned).context(cache)


def test_several_rows_and_none() -> None:
    cache = PagedEvictionCache(model_of().config, **OPTIONS)
    ids = torch.tensor(texts([9, 9], seed=1))
    model_of().generate(ids, **{CACHE_ARGUMENT: cache}, generation_config=greedy(2))
    with batching(model_of(), pool(8), **OPTIONS) as turned:
        with pytest.raises(ValueError, match="it is empty"):
            running(turned).context(PagedEvictionCache(model_of().config, **OPTIONS))
        with pytest.raises(ValueError, match="several rows"):
            running(turned).context(cache)

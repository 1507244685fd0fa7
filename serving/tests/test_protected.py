"""Requests with spans that are never evicted give what they give alone with `protect=`, and so do their neighbours."""

import random
from pathlib import Path
from typing import Any

import pytest

import driving
from driving import alone, answer, batching, feed, held_alone, model_of, pool, texts
from hf_paged_eviction import PagedEvictionCache

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 48, "block_size": 4, "policy": "keydiff"}
#: One that every prompt below begins with, and several, of which one lies in the answer.
SYSTEM, SEVERAL = [(0, 18)], [(3, 9), (30, 35), (66, 69)]


@pytest.mark.parametrize(
    ("chunk", "changes"),
    [(16, {}), (5, {"block_size": 1}), (64, {"policy": "lagkv", "recent_tokens": 7}), (16, {"sink_tokens": 0})],
)
def test_same_as_alone(chunk: int, changes: dict[str, Any]) -> None:
    """All at once and one after the other: requests of requests with spans are taken again by such as have none."""
    options = OPTIONS | changes
    prompts, news = texts([70, 33, 52, 55, 64, 20]), (8, 4, 4, 10, 9, 4)
    spans: list[Any] = [SYSTEM, SEVERAL, None, [(60, 64), (10, 11)], SEVERAL, SYSTEM]
    with batching(model_of(), pool(9, tokens=chunk + 4), prefill_chunk_size=chunk, **options) as turned:
        for at, (prompt, new, protect) in enumerate(zip(prompts, news, spans, strict=True)):
            turned.add(str(at), prompt, new, protect=protect)
        turned.run()
        turned.add("free", prompts[0], 8)
        turned.run()
    options["prefill_chunk_size"] = chunk
    for at, (prompt, new, protect) in enumerate(zip(prompts, news, spans, strict=True)):
        assert turned.answers[str(at)] == alone(model_of(), prompt, new, protect=protect, **options), at
    assert turned.answers["free"] == alone(model_of(), prompts[0], 8, **options)
    assert turned.answers["free"] != turned.answers["0"]


@pytest.mark.parametrize("spans", [SYSTEM, SEVERAL])
@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_held_to_the_end(spans: list[tuple[int, int]], heads: str) -> None:
    """Every layer holds them after as many tokens more as the budget, and the same others as the cache alone."""
    prompt, options = texts([60])[0], OPTIONS | {"heads": heads, "budget": 44}
    with batching(model_of(), pool(9), **options) as turned:
        turned.add("other", texts([44], seed=1)[0], 50)
        turned.add("0", prompt, 48, protect=spans)
        held = turned.last_held("0")
    wanted = {at for start, end in spans for at in range(start, end)}
    assert all(wanted <= set(tokens) for layer in held for tokens in layer)
    _, cache = held_alone(model_of(), prompt, 48, protect=spans, **options)
    assert held == [layer.table.positions[0].tolist() for _, layer in cache.paged_layers]


def test_begun_alike() -> None:
    """What one has left, others begin with who protect the same of it."""
    draw, system = random.Random(1), texts([26], seed=5)[0]
    requests = []
    for at in range(9):
        prompt = system + texts([draw.randint(1, 60)], seed=20 + at)[0]
        requests.append((prompt, draw.choice([None, [(0, 26)], [(0, 26)], [(0, 13), (20, 26)]])))
    with batching(model_of(), pool(30, 4, 24, allow_block_sharing=True), **OPTIONS) as turned:
        for at, (prompt, spans) in enumerate(requests):
            turned.add(str(at), prompt, 5, protect=spans)
            if at % 3:
                turned.run()
        turned.run()
        shared = turned.bounded.prefixes.hits
    for at, (prompt, spans) in enumerate(requests):
        assert turned.answers[str(at)] == alone(model_of(), prompt, 5, protect=spans, **OPTIONS), at
    assert shared > 0


@pytest.mark.parametrize("length", [30, 90])
def test_after_a_saved_context(tmp_path: Path, length: int) -> None:
    """The context brings its own spans; those of the request count from its own first token."""
    text, question, own = texts([length])[0], texts([40], seed=3)[0], [(4, 12)]
    brought = [(6, 13)]

    def read(spans: list[tuple[int, int]]) -> PagedEvictionCache:
        cache = PagedEvictionCache(model_of().config, protect=spans, **OPTIONS)
        feed(model_of(), cache, text)
        return cache

    file = tmp_path / "context"
    read(brought).save(file)
    with batching(model_of(), pool(9), **OPTIONS) as turned:
        running = vars(turned.manager.model)["init_continuous_batching"].__self__
        context = running.context(PagedEvictionCache.load(file, model_of().config))
        turned.add("brought", question, 12, context=context)
        turned.add("both", question, 12, context=context, protect=own)
        turned.run()
    later = [(length + start, length + end) for start, end in own]
    for name, spans in (("brought", brought), ("both", brought + later)):
        assert turned.answers[name] == answer(model_of(), read(spans), question, 12), name
    assert turned.answers["brought"] != turned.answers["both"]


def test_refused() -> None:
    with batching(model_of(), pool(9), **OPTIONS) as turned:
        with pytest.raises(ValueError, match=r"budget=48.*41"):
            turned.add("long", [1, 2, 3], 4, protect=[(0, 41)])
        with pytest.raises(TypeError, match=r"spans.*2"):
            turned.add("rows", [1, 2, 3], 4, protect=[[(0, 4)], [(0, 5)]])
        with pytest.raises(TypeError, match="spans_of_roles"):
            turned.add("words", [1, 2, 3], 4, protect=["system"])
        with (
            pytest.raises(ValueError, match="add_request"),
            batching(model_of("gemma3"), pool(9), protect=SYSTEM, **OPTIONS),
        ):
            pass
        turned.add("good", [1, 2, 3], 4)
        turned.run()
    assert list(turned.answers) == ["good"]

"""Requests that begin alike share what is never evicted, and give what they give alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

import driving
from driving import Batching, alone, batching, model_of, pool, texts

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 64, "block_size": 4, "policy": "keydiff", "sink_tokens": 37}
PAGE, PAGES_EACH = 8, 8
BEGINNING, OTHER = texts([37, 37], seed=5)
#: How many tokens of the beginning, and what follows.
ASKED = [(37, 20), (37, 60), (30, 9), (37, 1), (37, 33), (17, 40), (7, 5)]


def prompts() -> list[list[int]]:
    rests = texts([rest for _, rest in ASKED], seed=6)
    return [BEGINNING[:count] + rest for (count, _), rest in zip(ASKED, rests, strict=True)]


def run(chunk: int, gap: int, pages: int = 40, **changes: Any) -> Batching:
    """Requests that arrive `gap` steps after each other."""
    config = pool(pages, PAGE, chunk + 8, allow_block_sharing=True)
    with batching(model_of(), config, **OPTIONS, prefill_chunk_size=chunk, **changes) as turned:
        adding = [
            (lambda turned, at=at, prompt=prompt: turned.add(str(at), prompt, 20))
            for at, prompt in enumerate(prompts())
        ]
        turned.run({at * gap: [add] for at, add in enumerate(adding)} if gap else {0: adding})
        stats = turned.manager.stats()
        assert stats.pages_in_use == stats.live == 0
        assert turned.free == pages - stats.pages_kept
    return turned


@pytest.mark.parametrize(("chunk", "gap"), [(16, 3), (16, 40), (5, 9), (24, 4), (48, 2), (16, 0)])
def test_same_as_alone(chunk: int, gap: int) -> None:
    """Whatever is cut where, and whether the pages are still in use or only kept."""
    turned = run(chunk, gap)
    for at, prompt in enumerate(prompts()):
        assert turned.answers[str(at)] == alone(model_of(), prompt, 20, prefill_chunk_size=chunk, **OPTIONS), at
    # 4 pages of 8 lie within 37 tokens; request 2 shares 3 of them, request 5 two.
    assert gap <= chunk or turned.manager.stats().shared == 8 * (3 * 4 + 3 + 2)
    assert turned.manager.stats().shared > 0


def test_less_room() -> None:
    """Pages that are kept make room for requests."""
    with batching(
        model_of(), pool(PAGES_EACH, PAGE, 24, allow_block_sharing=True), **OPTIONS, prefill_chunk_size=16
    ) as turned:
        asked = [BEGINNING, OTHER + OTHER[:30], BEGINNING + OTHER, OTHER]
        for at, prompt in enumerate(asked):
            turned.add(str(at), prompt, 20)
        turned.run()
        assert turned.free + turned.manager.stats().pages_kept == PAGES_EACH
        turned.processor.reset()
        assert turned.free == PAGES_EACH
    for at, prompt in enumerate(asked):
        assert turned.answers[str(at)] == alone(model_of(), prompt, 20, prefill_chunk_size=16, **OPTIONS), at


def test_any_order() -> None:
    """Many requests on few pages, some cancelled, with beginnings that are prefixes of each other."""
    draw = random.Random(1)
    beginnings = [BEGINNING, BEGINNING[:16] + OTHER[:21], OTHER]
    asked = [draw.choice(beginnings) + texts([draw.randint(0, 40)], seed=at)[0] for at in range(14)]
    schedule: dict[int, list[Any]] = {}
    for at, prompt in enumerate(asked):
        step = draw.randrange(60)
        schedule.setdefault(step, []).append(lambda turned, at=at, prompt=prompt: turned.add(str(at), prompt, 9))
        if at % 5 == 4:
            schedule.setdefault(step + draw.randrange(1, 6), []).append(
                lambda turned, at=at: turned.manager.cancel_request(str(at))
            )
    pages = 2 * PAGES_EACH + 3
    config = pool(pages, PAGE, 24, allow_block_sharing=True)
    with batching(model_of(), config, **OPTIONS, prefill_chunk_size=16) as turned:
        turned.run(schedule)
        stats = turned.manager.stats()
        assert stats.shared > 0
        assert turned.free == pages - stats.pages_kept
    for at, prompt in enumerate(asked):
        if str(at) in turned.answers or at % 5 != 4:
            assert turned.answers[str(at)] == alone(model_of(), prompt, 9, prefill_chunk_size=16, **OPTIONS), at


def test_off() -> None:
    with batching(model_of(), pool(40, PAGE, 24), **OPTIONS, prefill_chunk_size=16) as turned:
        for at in range(2):
            turned.add(str(at), prompts()[0], 5)
            turned.run()
        assert turned.manager.stats().shared == turned.manager.stats().pages_kept == 0

"""A prompt that begins as an earlier one did is not read again, and gives what it gives alone."""

import random
from typing import Any

import pytest

import driving
from driving import Batching, alone, batching, model_of, pool, texts
from hf_paged_eviction.allocators import Heads

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4, "policy": "keydiff"}
KINDS: dict[str, dict[str, Any]] = {
    "equal": {},
    "separate": {"policy": "value_norm"},
    "heads": {"allocator": Heads.of([[0.3, 1.7], [1.4, 0.6]])},
    "queries": {"policy": "h2o"},
    "few_bits": {"policy": "paged_eviction", "bits": 4},
    "few_bits_of_heads": {"bits": (8, 3), "allocator": Heads.of([[0.3, 1.7], [1.4, 0.6]])},
    "queries_of_heads": {"policy": "snapkv(window=3)", "allocator": Heads.of([[0.3, 1.7], [1.4, 0.6]])},
}
SHARED = {"allow_block_sharing": True}


@pytest.mark.parametrize("kind", KINDS)
def test_turns(kind: str) -> None:
    """Each turn begins with all that was said before: only what is new since the last cut is read."""
    options, history, prompts = OPTIONS | KINDS[kind], [], []
    for at, turn in enumerate(texts([21, 13, 30, 16, 7], seed=5)):
        history = history + turn + texts([5], seed=50 + at)[0]
        prompts.append(history)
    with batching(model_of(), pool(9, **SHARED), **options) as turned:
        for at, prompt in enumerate(prompts):
            turned.add(str(at), prompt, 4)
            turned.run()
        prefixes = turned.bounded.prefixes
        assert turned.free == 9
    assert [turned.answers[str(at)] for at in range(5)] == [alone(model_of(), ids, 4, **options) for ids in prompts]
    # Prompts of 26, 44, 79, 100 and 112 tokens, cut every 16.
    assert prefixes.hits == 16 + 32 + 64 + 96
    assert prefixes.bytes > 0


def test_a_beginning_is_kept_when_it_comes_again() -> None:
    """Of a prompt its last cut is kept; others when a second prompt passes them."""
    system, prompts = texts([37], seed=5)[0], texts([40, 41, 42], seed=6)
    with batching(model_of(), pool(9, **SHARED), **OPTIONS) as turned:
        shared = []
        for at, prompt in enumerate(prompts):
            turned.add(str(at), system + prompt, 4)
            turned.run()
            shared.append(turned.bounded.prefixes.hits)
    assert shared == [0, 0, 32]
    for at, prompt in enumerate(prompts):
        assert turned.answers[str(at)] == alone(model_of(), system + prompt, 4, **OPTIONS)


def asking_twice(turned: Batching, prompt: list[int], *options: dict[str, Any]) -> int:
    for at, settings in enumerate(options):
        turned.add(str(at), prompt, 4, **settings)
        turned.run()
    return int(turned.bounded.prefixes.hits)


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        (({}, {}), 64),
        (({"salt": "a"}, {"salt": "a"}), 64),
        (({"salt": "a"}, {"salt": "b"}), 0),
        (({"salt": "a"}, {}), 0),
        (({"protect": [(3, 9)]}, {"protect": [(3, 9)]}), 64),
        (({"protect": [(3, 9)]}, {}), 0),
        (({"budget": 24}, {"budget": 24}), 64),
        (({"budget": 24}, {}), 0),
        (({"budget": 32}, {}), 64),
        (({"protect": [(66, 69)]}, {}), 64),
    ],
)
def test_whose_beginnings_are_used(options: tuple[dict[str, Any], ...], shared: int) -> None:
    prompt = texts([70])[0]
    with batching(model_of(), pool(9, **SHARED), **OPTIONS) as turned:
        assert asking_twice(turned, prompt, *options) == shared
    for at, settings in enumerate(options):
        own = OPTIONS | {name: value for name, value in settings.items() if name != "salt"}
        assert turned.answers[str(at)] == alone(model_of(), prompt, 4, **own)


@pytest.mark.parametrize(
    ("config", "changes"), [({}, {}), (SHARED, {"prefix_cache": None}), (SHARED, {"prefix_cache": 9})]
)
def test_off(config: dict[str, Any], changes: dict[str, Any]) -> None:
    with batching(model_of(), pool(9, **config), **OPTIONS, **changes) as turned:
        assert asking_twice(turned, texts([70])[0], {}, {}) == 0
        assert turned.bounded.prefixes.bytes == 0


def test_bounded() -> None:
    """No more bytes than were given; the least recently used goes first."""
    first, *others = texts([70, 71, 72, 73], seed=8)
    with batching(model_of(), pool(9, **SHARED), **OPTIONS) as turned:
        asking_twice(turned, first, {})
        one = turned.bounded.prefixes.bytes
    with batching(model_of(), pool(9, **SHARED), **OPTIONS, prefix_cache=2 * one) as turned:
        for at, prompt in enumerate([first, others[0], first, others[1], first, others[0]]):
            turned.add(str(at), prompt, 2)
            turned.run()
            assert turned.bounded.prefixes.bytes <= 2 * one
        assert turned.bounded.prefixes.hits == 2 * 64


@pytest.mark.parametrize("kind", ["heads", "few_bits_of_heads"])
def test_any_order(kind: str) -> None:
    """Many requests on few pages, some cancelled, with beginnings that are prefixes of each other."""
    draw = random.Random(1)
    first, other = texts([37, 37], seed=5)
    beginnings = [first, first[:16] + other[:21], other]
    prompts = [draw.choice(beginnings) + texts([draw.randint(0, 40)], seed=at)[0] for at in range(14)]
    schedule: dict[int, list[Any]] = {}
    for at, prompt in enumerate(prompts):
        step = draw.randrange(60)
        schedule.setdefault(step, []).append(lambda turned, at=at, prompt=prompt: turned.add(str(at), prompt, 5))
        if at % 5 == 4:
            schedule.setdefault(step + draw.randrange(1, 6), []).append(
                lambda turned, at=at: turned.manager.cancel_request(str(at))
            )
    with batching(model_of(), pool(7, **SHARED), **(OPTIONS | KINDS[kind])) as turned:
        turned.run(schedule)
        assert turned.bounded.prefixes.hits > 0
        assert turned.free == 7
    for at, prompt in enumerate(prompts):
        if str(at) in turned.answers or at % 5 != 4:
            assert turned.answers[str(at)] == alone(model_of(), prompt, 5, **(OPTIONS | KINDS[kind])), at

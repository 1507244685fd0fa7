"""Whatever is raised for one request fails it alone, wherever it is raised: the others answer as they do alone."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

import pytest
import torch

import driving
from driving import alone, batching, model_of, pool, texts
from hf_paged_eviction_serving import Sampler, Sampling

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 16, "block_size": 4, "policy": "keydiff"}
#: With statistics of queries.
WATCHING = OPTIONS | {"policy": "tova"}
#: Each token is scored before it is rounded.
CODED = OPTIONS | {"policy": "paged_eviction", "bits": 4}
KINDS = {"lone": OPTIONS, "watching": WATCHING, "coded": CODED}
NEW = 10
#: The first and the fifth begin alike, so that one continues from what the other has read.
LENGTHS = (40, 9, 33, 14)

#: Every call for one request between admission and answer: module, class, methods.
CALLS = {
    "hf_paged_eviction_serving.scheduler.FixedCutScheduler": "_why_refused _next _admit",
    "hf_paged_eviction_serving.allocator.BoundedAllocator": (
        "prepare has_room plan _keep_prefix allocate_cache_to_request"
    ),
    "hf_paged_eviction_serving.options.ServingOptions": "spans_of sizes_of pages",
    "hf_paged_eviction_serving.prefixes.Prefixes": "digests match wants keep",
    "hf_paged_eviction_serving.stock_pages.StockPages": "reserve",
    "hf_paged_eviction_serving.contexts.ServedContext": "begin held_by",
    "hf_paged_eviction.requests.table.RequestTable": ("add choose best all_of give put score_newest encode _score_all"),
    "hf_paged_eviction.requests.step.Step": "add _with_held _seen_together _see_single",
    "hf_paged_eviction_serving.stock_step.StockStep": "_attend_together",
    "hf_paged_eviction_serving.coded_pages.CodedPages": "reserve meet pick write save",
    "hf_paged_eviction.queries.observer.Observer": "start observe_many settle keep observe_block statistics",
    "hf_paged_eviction_serving.sampler.Sampler": "choose _changed _draw",
}
#: Those that only policies with statistics call.
_WATCHED = {"_see_single"}
#: Those that only pages in few bits call.
_CODED = {"score_newest", "encode"}
#: Where victims of several requests are chosen together, and then of each alone if that fails.
_REPEATED = {"choose", "_score_all", "statistics", "score_newest", "encode", "write"}
_TRANSFORMERS = "transformers.generation.continuous_batching"
#: Calls of transformers' loop that take in a token of one request, or end one.
LOOP = {
    f"{_TRANSFORMERS}.requests.RequestState": "update_and_check_completion to_generation_output",
    f"{_TRANSFORMERS}.cache.PagedAttentionCache": "mark_complete_blocks",
    f"{_TRANSFORMERS}.scheduler.Scheduler": "finish_request",
}
CASES = [(path, name) for path, names in (CALLS | LOOP).items() for name in names.split()]


class OddError(Exception):
    """An error that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def answers(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What each request is given, and what is left of them."""
    prompts = [*texts(LENGTHS), texts(LENGTHS)[0]]
    with batching(model_of(), pool(6, allow_block_sharing=True), prefix_cache="1MiB", **options) as turned:
        for at, prompt in enumerate(prompts[:-1]):
            settings = Sampling(temperature=0.7 if at == 3 else 0.0, seed=at)
            try:
                turned.add(str(at), prompt, NEW, sampler=Sampler(settings))
            except ValueError as error:  # it was not even taken
                turned.answers[str(at)] = str(error)
        turned.run()
        turned.add("4", prompts[-1], NEW, sampler=Sampler(Sampling()))
        turned.run()
        left = turned.bounded.pages_in_use, turned.free, list(turned.processor.scheduler.active_requests)
        return dict(turned.answers), left


@cache
def undisturbed(kind: str) -> tuple[dict[str, Any], dict[tuple[str, str], tuple[int, int]]]:
    """What each request is given; how often each of `CASES` is called while batching is made, and until the end."""
    calls: Counter[tuple[str, str]] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for case in CASES:
            before_each(patch, *case, partial(calls.update, [case]))
        with batching(model_of(), pool(6), **KINDS[kind]):
            before = dict(calls)
        calls.clear()
        got, _ = answers(KINDS[kind])
    return got, {case: (before.get(case, 0), calls[case]) for case in CASES}


def before_each(patch: pytest.MonkeyPatch, path: str, name: str, act: Callable[[], None]) -> None:
    """Something happens before every call of a method."""
    module, _, owner = path.rpartition(".")
    cls = getattr(import_module(module), owner)
    method = getattr(cls, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act()
        return method(*args, **kwargs)

    patch.setattr(cls, name, call)


def test_these_are_the_lone_answers() -> None:
    prompts = texts(LENGTHS)
    for kind, options in KINDS.items():
        got, _ = undisturbed(kind)
        for at in (0, 1, 2):
            assert got[str(at)] == alone(model_of(), prompts[at], NEW, **options)
        assert got["4"] == got["0"]


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize(("path", "name"), CASES, ids=[name for _, name in CASES])
def test_one_fault_fails_one_request(path: str, name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "watching" if name in _WATCHED or "observer" in path else "lone"
    kind = "coded" if "coded" in path or name in _CODED else kind
    wanted, counts = undisturbed(kind)
    before, count = counts[path, name]
    assert count > before, "never called for a request, so that this test says nothing"
    fails = {"first": before + 1, "middle": (before + count + 1) // 2, "last": count}[place]
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls == fails:
            raise OddError if place == "middle" else ValueError("a fault")

    before_each(monkeypatch, path, name, fail)
    got, left = answers(KINDS[kind])
    assert calls >= fails
    assert left == (0, 6, [])
    failed = [number for number, answer in got.items() if answer != wanted[number]]
    assert len(got) == 5 and len(failed) <= 1, got
    if failed or name not in _REPEATED:
        fault = "OddError" if place == "middle" else "a fault"
        assert [got[number].rpartition(": ")[2] for number in failed] == [fault]


@pytest.mark.parametrize("place", [1, 3, 5])
def test_pages_that_cannot_be_given_back(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request has its answer, and the others go on with the other pages."""
    from transformers.generation.continuous_batching.cache_allocators import CachePool

    free_blocks, calls, wanted = CachePool.free_blocks, [0], undisturbed("lone")[0]

    @wraps(free_blocks)
    def faulty(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == place:
            raise OddError
        return free_blocks(*args)

    monkeypatch.setattr(CachePool, "free_blocks", faulty)
    got, (in_use, free, active) = answers(OPTIONS)
    assert got == wanted and calls[0] >= place
    assert in_use == 0 and free < 6 and not active


def test_generation_ends_when_the_pages_left_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a supervisor starts it anew, instead of refusing all requests from then on."""
    from transformers.generation.continuous_batching.cache_allocators import CachePool

    @wraps(CachePool.free_blocks)
    def faulty(*args: Any) -> None:
        raise OddError

    monkeypatch.setattr(CachePool, "free_blocks", faulty)
    with (
        batching(model_of(), pool(6), **OPTIONS) as turned,
        pytest.raises(RuntimeError, match="could not be given back"),
    ):
        for at in range(20):
            turned.add(str(at), texts([9])[0], 2)
        turned.run()
    assert 1 <= len(turned.answers) < 20


def test_logits_that_are_no_numbers_are_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sampler, too, where transformers draws for all together."""
    prompts, head = texts([20, 9]), model_of().lm_head
    broken: list[int] = [1]

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        output = output.clone()
        if output.shape[1] == 2:
            output[0, broken] = math.nan
        return output

    hook = head.register_forward_hook(spoil)
    try:
        with batching(model_of(), pool(8), **OPTIONS) as turned:
            turned.manager.generation_config.do_sample = True
            for at, prompt in enumerate(prompts):
                turned.add(str(at), prompt, 6)
            turned.run()
            assert turned.bounded.pages_in_use == 0
    finally:
        hook.remove()
    texts_of = [answer for answer in turned.answers.values() if isinstance(answer, str)]
    assert texts_of == ["its sampler failed: the logits are not finite numbers"]
    assert len(turned.answers) == 2


def test_a_closed_loop_is_of_one_request() -> None:
    """Nobody can hear the one; the others are answered."""
    prompts = texts([20, 9])
    with batching(model_of(), pool(8), **OPTIONS) as turned:

        async def register() -> None:
            turned.manager.register_result_handler("0", lambda output: None)

        asyncio.run(register())
        for at, prompt in enumerate(prompts):
            turned.add(str(at), prompt, NEW, streaming=True)
        turned.run()
        assert turned.bounded.pages_in_use == 0
    assert turned.answers == {"1": alone(model_of(), prompts[1], NEW, **OPTIONS)}


def test_each_loop_hears_its_own_results() -> None:
    """transformers calls those of all loops in one of them."""
    prompts, heard = texts([20, 9]), {}
    loops = [asyncio.new_event_loop() for _ in prompts]
    try:
        with batching(model_of(), pool(8), **OPTIONS) as turned:

            async def register(name: str) -> None:
                def hear(output: Any) -> None:
                    heard[name] = asyncio.get_running_loop(), output.generated_tokens

                turned.manager.register_result_handler(name, hear)

            for at, prompt in enumerate(prompts):
                loops[at].run_until_complete(register(str(at)))
                turned.add(str(at), prompt, NEW)
            turned.run()
        for at, prompt in enumerate(prompts):
            loops[at].run_until_complete(asyncio.sleep(0))
            assert heard[str(at)] == (loops[at], alone(model_of(), prompt, NEW, **OPTIONS))
    finally:
        for loop in loops:
            loop.close()


def test_no_room_is_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for which even the empty cache has no room does not end generation for those behind it."""
    from hf_paged_eviction_serving.allocator import BoundedAllocator

    prompts, has_room = texts([20, 9]), BoundedAllocator.has_room
    monkeypatch.setattr(
        BoundedAllocator, "has_room", lambda bounded, request: len(request.prompt) < 20 and has_room(bounded, request)
    )
    with batching(model_of(), pool(8), **OPTIONS) as turned:
        for at, prompt in enumerate(prompts):
            turned.add(str(at), prompt, NEW)
        turned.run()
    assert turned.answers == {
        "0": "even the empty cache has no room for it",
        "1": alone(model_of(), prompts[1], NEW, **OPTIONS),
    }


WRONG: list[Any] = ["\udfff", "", "x", b"x", 1.5, math.nan, -1, 2**63, 10**30, True, [], [None], {}, object(), Sampler]
ARGUMENTS = "salt request_id budget protect context sampler max_new_tokens eos_token_id streaming no_such input_ids"


@pytest.mark.parametrize("name", ARGUMENTS.split())
def test_wrong_arguments_reach_nobody_else(name: str) -> None:
    """They are refused where they are given, or the request fails, or they change nothing."""
    prompts = texts([20, 9])
    with batching(model_of(), pool(8), **OPTIONS) as turned:
        turned.add("right", prompts[0], NEW)
        added = []
        for number, value in enumerate([*WRONG, [["x"]], [1.5], [2**70], torch.tensor([1.5]), {"a": 1}]):
            if name == "max_new_tokens" and isinstance(value, int) and value > 10**9:
                continue  # an answer that never ends
            arguments = {"input_ids": prompts[1], "request_id": f"w{number}", "max_new_tokens": 2} | {name: value}
            with suppress(TypeError, ValueError):
                added.append(turned.manager.add_request(**arguments))
        turned.run()
        assert turned.bounded.pages_in_use == 0 and turned.free == 8
    assert turned.answers["right"] == alone(model_of(), prompts[0], NEW, **OPTIONS)
    assert set(turned.answers) == {"right", *added}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"salt": "\udfff"}, ValueError),
        ({"request_id": "\udfff"}, ValueError),
        ({"salt": 1}, TypeError),
        ({"request_id": ["a"]}, TypeError),
        ({"input_ids": [1.5]}, TypeError),
        ({"input_ids": "text"}, TypeError),
        ({"max_new_tokens": 1.5}, TypeError),
        ({"eos_token_id": "x"}, TypeError),
        ({"sampler": Sampling()}, TypeError),
        ({"context": 1}, TypeError),
    ],
)
def test_wrong_types_are_refused_where_they_are_given(arguments: dict[str, Any], kind: type[Exception]) -> None:
    name = next(iter(arguments))
    with batching(model_of(), pool(8), **OPTIONS) as turned, pytest.raises(kind, match=name):
        turned.manager.add_request(**{"input_ids": [1, 2], "max_new_tokens": 2} | arguments)

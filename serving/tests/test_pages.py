"""A request never owns more pages than its budget needs, and they come back whatever becomes of it."""

from typing import Any

import pytest

import driving
from driving import alone, batching, greedy, model_of, pool, texts

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

OPTIONS: dict[str, Any] = {"budget": 32, "block_size": 4, "policy": "key_norm"}
#: Of 8 tokens each: budget 32.
BOUND = 4


def stock(pages: int, prompts: list[list[int]], new: int) -> tuple[int, int]:
    """Most pages of a request, and preemptions of transformers' own batching."""
    model = model_of()
    manager = model.init_continuous_batching(greedy(new), pool(pages, 8, 64))
    manager.current_batch = 0
    processor = manager.batch_processor = manager._create_batch_processor()
    for at, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=str(at), max_new_tokens=new, eos_token_id=-1)
    offload, preempted, most = processor.offloading_manager.offload_requests, 0, 0

    def counted() -> bool:
        nonlocal preempted
        before = len(processor.scheduler.active_requests)
        done = offload()
        preempted += before - len(processor.scheduler.active_requests)
        return bool(done)

    processor.offloading_manager.offload_requests = counted
    manager._generation_loop_body(processor, False)
    while processor.has_pending_requests():
        manager._generation_loop_body(processor, False)
        owned = [len(blocks) for blocks in processor.cache.cache_allocators["full_attention"].block_table.values()]
        most = max([most, *owned])
    return most, preempted


def test_bounded_and_never_preempted() -> None:
    prompts = texts([60, 45, 70, 33, 52, 41])
    with batching(model_of(), pool(3 * BOUND, 8), **OPTIONS) as turned:
        for at, prompt in enumerate(prompts):
            turned.add(str(at), prompt, 12)
        offloaded = []
        turned.processor.offloading_manager.offload_requests = lambda: offloaded.append(1)
        turned.run()
        assert max(turned.most_pages.values()) == BOUND
        assert turned.most_live == 3
        assert turned.free == 3 * BOUND
        assert not offloaded
    assert [turned.answers[str(at)] for at in range(6)] == [
        alone(model_of(), prompt, 12, **OPTIONS) for prompt in prompts
    ]
    # The control: without eviction requests own more, and push each other out.
    most, preempted = stock(3 * BOUND + 4, prompts, 12)
    assert most > BOUND
    assert preempted


def test_short_requests_reserve_what_they_need() -> None:
    """A request that cannot become long owns fewer pages, so that more of them are live."""
    with batching(model_of(), pool(BOUND, 8), **OPTIONS) as turned:
        for at, prompt in enumerate(texts([4, 5, 5, 4])):
            turned.add(str(at), prompt, 3)
        turned.step()
        assert turned.most_live == 4
        turned.run()
        assert set(turned.most_pages.values()) == {1}
        assert turned.free == BOUND


@pytest.mark.parametrize("steps", [0, 1, 2, 12])
def test_cancelled_while_it_waits_reads_or_answers(steps: int) -> None:
    with batching(model_of(), pool(2 * BOUND, 8), **OPTIONS) as turned:
        for at, prompt in enumerate(texts([60, 45, 33])):
            turned.add(str(at), prompt, 20)
        for _ in range(steps):
            turned.step()
        turned.manager.cancel_request("0")
        turned.manager.cancel_request("2")
        turned.manager.cancel_request("unknown")
        turned.run()
        assert turned.free == 2 * BOUND
        assert not turned.bounded._prepared
    assert "0" not in turned.answers
    assert turned.answers["1"] == alone(model_of(), texts([60, 45])[1], 20, **OPTIONS)


@pytest.mark.parametrize("reused", [False, True])
def test_a_cancel_that_overtakes_its_request(reused: bool) -> None:
    """transformers empties the queue of requests first: one that comes then is cancelled before it is known. Its name
    may be used again once it has gone."""
    with batching(model_of(), pool(2 * BOUND, 8), **OPTIONS) as turned:
        turned.add("0", texts([30])[0], 12)
        requests, processor = turned.processor.input_queue, turned.processor

        class Late:
            """Finds nothing any more, and then somebody comes and goes."""

            def empty(self) -> bool:
                if requests.empty() and processor.input_queue is self:
                    processor.input_queue = requests
                    turned.add("1", texts([40])[0], 12)
                    turned.manager.cancel_request("1")
                    return True
                return bool(requests.empty())

            def get_nowait(self) -> Any:
                return requests.get_nowait()

        processor.input_queue = Late()
        turned.step()
        turned.step()
        assert list(turned.bounded.block_table) == ["0"]
        if reused:
            turned.step()
            turned.add("1", texts([40, 20])[1], 5)
        turned.run()
        assert turned.free == 2 * BOUND
    assert turned.answers == {"0": alone(model_of(), texts([30])[0], 12, **OPTIONS)} | (
        {"1": alone(model_of(), texts([40, 20])[1], 5, **OPTIONS)} if reused else {}
    )


BAD: dict[str, tuple[list[int], int, str]] = {
    "empty": ([], 5, "prompt is empty"),
    "unknown": ([3, 10**6], 5, "1000000 is not a token of this model"),
    "negative": ([-3], 5, "-3 is not a token of this model"),
    "nothing": ([3], 0, "max_new_tokens must be at least 1"),
}


def test_what_cannot_be_served_fails_alone() -> None:
    """A request that would break the step that it is part of gets an error, and nobody else."""
    prompt = texts([40])[0]
    with batching(model_of(), pool(3 * BOUND, 8), **OPTIONS) as turned:
        turned.add("good", prompt, 12)
        for name, (tokens, new, _) in BAD.items():
            turned.add(name, tokens, new)
        turned.run()
        assert turned.free == 3 * BOUND
    assert turned.answers["good"] == alone(model_of(), prompt, 12, **OPTIONS)
    for name, (_, _, reason) in BAD.items():
        assert reason in str(turned.answers[name])


def test_a_name_twice() -> None:
    with batching(model_of(), pool(3 * BOUND, 8), **OPTIONS) as turned:
        turned.add("twin", texts([40])[0], 12)
        turned.step()
        turned.add("twin", texts([9])[0], 12)
        turned.step()
        assert "is already live" in str(turned.answers.pop("twin"))
        turned.run()
        assert turned.free == 3 * BOUND
    assert turned.answers["twin"] == alone(model_of(), texts([40])[0], 12, **OPTIONS)


def test_a_broken_forward_leaves_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    with batching(model, pool(3 * BOUND, 8), **OPTIONS) as turned:
        for at, prompt in enumerate(texts([40, 9, 20])):
            turned.add(str(at), prompt, 12)
        for _ in range(3):
            turned.step()
        assert turned.free < 3 * BOUND
        monkeypatch.setattr(model.model.layers[1], "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError) as broken:
            turned.step()
        turned.manager._handle_critical_error(broken.value, turned.processor)
        turned._collect()
        assert turned.free == 3 * BOUND
        assert set(turned.answers.values()) == {"division by zero"}
        monkeypatch.undo()
        # The same pages serve again: nothing of the broken step is left.
        turned.manager.background_thread_status.clear()
        turned.processor.reset()
        turned.add("again", texts([40])[0], 12)
        turned.run()
    assert turned.answers["again"] == alone(model, texts([40])[0], 12, **OPTIONS)

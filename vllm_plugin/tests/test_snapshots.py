"""Conversations: what a request held when it ended is where the next turn begins."""

import copy
import itertools
import random
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from alone import answer, cache_of, feed
from draw_servers import Asked, is_right
from engines import Server, drawn, served
from tiny_models import tiny


class Chats:
    """Several conversations at once; each answer is compared with a cache alone that was fed the same cuts.

    Args:
        answer: least and most tokens of an answer.
    """

    def __init__(self, server: Server, count: int, turns: int, answer: tuple[int, int]) -> None:
        self._server, self._turns, self._answer, self._rng = server, turns, answer, random.Random(0)
        self._texts: list[list[int]] = [[] for _ in range(count)]
        self._turn = [0] * count
        self.asked: dict[str, Asked] = {}
        self.preempted = 0
        self.new = 0

    def run(self, preempt_every: int = 0) -> None:
        for chat in range(len(self._texts)):
            self._ask(chat)
        for step in itertools.count(1):
            if not self._server.llm.llm_engine.has_unfinished_requests():
                break
            if preempt_every and step % preempt_every == 0:
                self.preempted += self._server.preempt()
            for name, tokens in self._server.step().items():
                chat = int(name.split("t")[0][1:])
                self.asked[name].answers = [tokens]
                self._texts[chat] = self._texts[chat] + tokens
                self.new += len(tokens)
                if self._turn[chat] < self._turns:
                    self._ask(chat)

    def _ask(self, chat: int) -> None:
        user, name = drawn(self._rng, self._rng.randint(90, 130)), f"c{chat}t{self._turn[chat]}"
        new = self._rng.randint(*self._answer)
        self._texts[chat] = self._texts[chat] + user
        self.asked[name] = Asked([self._texts[chat]], new)
        self._turn[chat] += 1
        self.new += len(user)
        self._server.add(name, self._texts[chat], new)

    @property
    def begun(self) -> int:
        """Number of requests that began with a snapshot."""
        return sum(map(bool, self._server.record.begun.values()))

    @property
    def read(self) -> int:
        return sum(sum(chunks) for chunks in self._server.record.chunks.values())

    def check(self) -> None:
        """Each conversation is read once: a turn goes on from a copy of what the turn before held."""
        record, model = self._server.record, self._server.model
        for chat in range(len(self._texts)):
            held, known = None, [0]
            for turn in range(self._turns):
                one, request = self.asked[f"c{chat}t{turn}"], record.name(f"c{chat}t{turn}")
                begun, text, given, right = record.begun[request], one.text, one.given, True
                stop = sum(record.begun[record.name(f"c{chat}t{turn + 1}")]) if turn + 1 < self._turns else 0
                cache, start = (
                    (held, sum(begun)) if begun == known else (cache_of(model.config, self._server.options), 0)
                )
                at = 0
                for count in record.cuts(request):
                    at += count
                    if at > start:
                        token = feed(model, text[at - count : at], cache)
                        right &= at < record.read[request] or given.get(at, token) == token
                    if at == stop:
                        held, known = copy.deepcopy(cache), record.cuts(request, stop)
                assert right or is_right(self._server, f"c{chat}t{turn}", one), f"c{chat}t{turn}"


@pytest.mark.parametrize(
    ("options", "engine", "new", "most"),
    [
        ({"policy": "keydiff"}, {}, (40, 40), 1.2),
        ({"policy": "paged_eviction", "heads": "separate", "block_size": 4}, {}, (40, 40), 1.2),
        ({"policy": "keydiff", "allocator": "heads:[[1.0, 0.3], [2.0, 0.7]]"}, {}, (40, 40), 1.3),
        ({"policy": "key_norm"}, {"scheduler_cls": "hf_paged_eviction_vllm.scheduler.Scheduler"}, (5, 16), 1.2),
        ({"policy": "keydiff"}, {"kv_cache_memory_bytes": 3 << 20}, (40, 40), 9.0),  # the pool reuses them
    ],
)
def test_turns_go_on_from_snapshots(
    options: dict[str, Any], engine: dict[str, Any], new: tuple[int, int], most: float
) -> None:
    """Twelve conversations of ten turns."""
    folder, model = tiny("llama")
    with served(
        folder, model, {"budget": 256} | options, max_model_len=2048, **{"max_num_seqs": 12} | engine
    ) as server:
        chats = Chats(server, 12, 10, new)
        chats.run()
        server.check_blocks()
        assert chats.begun
        assert chats.read <= most * chats.new
        chats.check()


def _ask(server: Server, name: str, prompt: list[int], new: int, **more: Any) -> tuple[list[int], int]:
    """The answer to a request alone, and how many of its tokens were read."""
    server.add(name, prompt, new, **more)
    (given,) = server.finish().values()
    request = next(request for request in server.record.chunks if request.startswith(f"{name}-"))
    return given, sum(server.record.chunks[request]) - new + 1


CUTTING = {"scheduler_cls": "hf_paged_eviction_vllm.scheduler.Scheduler"}


@pytest.mark.parametrize("system", [104, 200])
@pytest.mark.parametrize(
    "options",
    [{"policy": "keydiff"}, {"policy": "keydiff", "allocator": "heads:[[1.0, 0.3], [2.0, 0.7]]"}, {"block_size": 4}],
)
def test_a_beginning_that_many_share(options: dict[str, Any], system: int) -> None:
    """The second request finds it, the third one begins with it; within the budget, and beyond."""
    (folder, model), rng = tiny("llama"), random.Random(1)
    engine = CUTTING | {"max_num_batched_tokens": 128}
    with served(folder, model, {"budget": 128, "policy": "key_norm"} | options, **engine) as server:
        begin, reads = drawn(rng, system), []
        for number in range(5):
            prompt = begin + drawn(rng, 90 + 20 * number)
            one = Asked([prompt], 20)
            given, read = _ask(server, f"r{number}", prompt, 20)
            one.answers = [given]
            reads.append(len(prompt) - read)
            assert is_right(server, f"r{number}", one), number
        assert reads == [0, 0] + [system // 32 * 32] * 3
        server.check_blocks()


@pytest.mark.parametrize("length", [100, 300])
def test_the_same_prompt_again(length: int) -> None:
    (folder, model), rng = tiny("llama"), random.Random(1)
    with served(folder, model, {"budget": 128, "policy": "keydiff"}, **CUTTING) as server:
        prompt = drawn(rng, length)
        answers, reads = zip(*(_ask(server, f"r{number}", prompt, 60) for number in range(4)), strict=True)
        assert reads == (length, length, length % 32, length % 32)
        assert answers[0] == answers[1] == answers[2] == answers[3]
        assert list(answers[0]) == answer(model, server.options, prompt, [length // 32 * 32, length % 32], 60)


def test_a_server_that_takes_no_new_requests_finishes_those_it_has() -> None:
    """While it is paused no request gives up its blocks, or nobody would give it others."""
    (folder, model), rng = tiny("llama"), random.Random(1)
    with served(folder, model, {"budget": 128, "policy": "keydiff"}, **CUTTING) as server:
        prompt = drawn(rng, 300)
        _ask(server, "first", prompt, 60)  # its snapshot is longer
        server.add("again", prompt, 2)
        server.step()  # up to where both begin alike
        server.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        answers = [server.step() for _ in range(8)]
        assert sum(map(len, answers)) == 1
        assert server.record.chunks[server.record.name("again")] == [288, 12, 1]
        server.scheduler.set_pause_state(PauseState.UNPAUSED)
        server.check_blocks()


def test_a_pool_that_holds_no_copy_beside_a_request() -> None:
    """Then nothing is kept, or the next turn would wait for ever."""
    (folder, model), rng = tiny("llama"), random.Random(2)
    options, block = {"budget": 128, "policy": "keydiff"}, 32 * 2 * 2 * 64 * 4
    for blocks, kept in ((10, False), (13, True)):
        engine = {"kv_cache_memory_bytes": (blocks + 1) * block, "max_num_batched_tokens": 64, "max_num_seqs": 2}
        with served(folder, model, options, **engine) as server:
            assert server.record.managers[0].block_pool.num_gpu_blocks - 1 == blocks
            text = drawn(rng, 150)
            for turn in range(3):
                given, read = _ask(server, f"t{turn}", text, 40)
                assert (read < len(text)) == (kept and turn > 0)
                text = text + given + drawn(rng, 20)
            server.check_blocks()


def test_what_is_not_shared() -> None:
    """Salts keep texts apart, a reset forgets all, and requests with options of their own leave and take nothing."""
    (folder, model), rng = tiny("llama"), random.Random(2)
    with served(folder, model, {"budget": 96, "policy": "keydiff"}) as server:
        prompt = drawn(rng, 150)
        given, _ = _ask(server, "first", prompt, 40)
        text = prompt + given + drawn(rng, 30)
        begun = len(text) - (150 + 39) // 32 * 32

        def read(name: str, **more: Any) -> int:
            return _ask(server, name, text, 2, **more)[1]

        assert read("salted", salt="other") == len(text)
        assert read("options", extra={"paged_eviction_budget": 64}) == len(text)
        assert read("unread", anew=True) == len(text)
        assert read("same") == begun
        assert server.llm.llm_engine.reset_prefix_cache()
        assert read("after") == len(text)
        server.check_blocks()


@pytest.mark.parametrize("allocator", ["uniform", "heads:[[1.0, 0.3], [2.0, 0.7]]"])
def test_turns_with_preemption(allocator: str) -> None:
    """A request that is preempted goes on from the snapshot of the turn before, too."""
    folder, model = tiny("llama")
    options = {"budget": 128, "policy": "keydiff", "allocator": allocator, "heads": "separate"}
    with served(folder, model, options, max_num_batched_tokens=128) as server:
        chats = Chats(server, 4, 4, (40, 40))
        chats.run(preempt_every=15)
        server.check_blocks()
        assert chats.preempted > 4 and chats.begun
        chats.check()

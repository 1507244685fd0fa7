"""Conversations: what a request held when it ended is where the next turn begins."""

import copy
import itertools
import random
from typing import Any

import pytest
import torch

from alone import answer, cache_of
from engines import Server, drawn, served
from hf_paged_eviction_vllm.snapshots import snapshots_of
from tiny_models import tiny


class Chats:
    """Several conversations at once; each answer is compared with a cache alone that was fed the same cuts."""

    def __init__(self, server: Server, count: int, turns: int, answer: int) -> None:
        self._server, self._turns, self._answer, self._rng = server, turns, answer, random.Random(0)
        (self._manager,) = server.record.managers
        self._texts: list[list[int]] = [[] for _ in range(count)]
        self._turn = [0] * count
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.begun: dict[str, tuple[str, int]] = {}  # request: whose snapshot, and its tokens
        self.preempted = 0
        self.new, self._add = 0, self._manager.add_local_computed_blocks
        self._manager.add_local_computed_blocks = self._noted

    def _noted(self, request: str, blocks: Any, count: int, *args: Any) -> None:
        known = snapshots_of(self._manager.block_pool).values()
        (origin,) = [one.origin for one in known if one.blocks and one.blocks[0] is blocks[0] and one.is_whole]
        self.begun[request] = origin, count
        self._add(request, blocks, count, *args)

    def run(self, preempt_every: int = 0) -> None:
        for chat in range(len(self._texts)):
            self._ask(chat)
        for step in itertools.count(1):
            if not self._server.llm.llm_engine.has_unfinished_requests():
                break
            if preempt_every and step % preempt_every == 0:
                self.preempted += self._server.preempt()
            for request, tokens in self._server.step().items():
                name = request.split("-")[0]
                chat = int(name.split("t")[0][1:])
                self.answers[name] = tokens
                self._texts[chat] = self._texts[chat] + tokens
                self.new += len(tokens)
                if self._turn[chat] < self._turns:
                    self._ask(chat)

    def _ask(self, chat: int) -> None:
        user, name = drawn(self._rng, self._rng.randrange(90, 131)), f"c{chat}t{self._turn[chat]}"
        self._texts[chat] = self.prompts[name] = self._texts[chat] + user
        self._turn[chat] += 1
        self.new += len(user)
        self._server.add(name, self.prompts[name], self._answer)

    @property
    def read(self) -> int:
        return sum(sum(chunks) for chunks in self._server.record.chunks.values())

    @torch.no_grad()
    def check(self) -> None:
        requests = {request.split("-")[0]: request for request in self._server.record.chunks}
        wanted, states = set(self.begun.values()), {}
        for name in sorted(self.answers, key=lambda name: int(name.split("t")[1])):
            request, text = requests[name], self.prompts[name] + self.answers[name]
            chunks, done = self._server.record.chunks[request], self._server.record.read[request]
            begun = self.begun.get(request) if sum(chunks) < len(text) - 1 else None  # that before a preemption is over
            cache = copy.deepcopy(states[begun]) if begun else cache_of(self._server.model.config, self._server.options)
            at, given = begun[1] if begun else 0, []
            for count in chunks:
                for stop in range(at + 1, at + count):  # within a chunk, if nothing was evicted yet
                    if (request, stop) in wanted:
                        states[request, stop] = copy.deepcopy(cache)
                        self._feed(text[at:stop], states[request, stop])
                logits = self._feed(text[at : at + count], cache)
                at += count
                if (request, at) in wanted:
                    states[request, at] = copy.deepcopy(cache)
                if at >= done:
                    given.append(int(logits.argmax()))
            assert given == self.answers[name][done - len(self.prompts[name]) :], name

    def _feed(self, tokens: list[int], cache: Any) -> Any:
        return self._server.model(input_ids=torch.tensor([tokens]), past_key_values=cache).logits[0, -1]


@pytest.mark.parametrize(
    ("options", "engine", "new", "most"),
    [
        ({"policy": "keydiff"}, {}, 40, 1.25),
        ({"policy": "paged_eviction", "heads": "separate", "block_size": 4}, {}, 40, 1.25),
        ({"policy": "keydiff", "allocator": "heads:[[1.0, 0.3], [2.0, 0.7]]"}, {}, 40, 1.3),
        ({"policy": "key_norm"}, {"scheduler_cls": "hf_paged_eviction_vllm.scheduler.Scheduler"}, 8, 1.25),
        ({"policy": "keydiff"}, {"kv_cache_memory_bytes": 3 << 20, "max_num_seqs": 4}, 40, 9.0),  # the pool reuses them
    ],
)
def test_turns_go_on_from_snapshots(options: dict[str, Any], engine: dict[str, Any], new: int, most: float) -> None:
    folder, model = tiny("llama")
    with served(folder, model, {"budget": 256} | options, max_model_len=2048, **engine) as server:
        chats = Chats(server, 6, 6, new)
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


@pytest.mark.parametrize(
    "options",
    [{"policy": "keydiff"}, {"policy": "keydiff", "allocator": "heads:[[1.0, 0.3], [2.0, 0.7]]"}, {"block_size": 4}],
)
def test_a_beginning_that_many_share(options: dict[str, Any]) -> None:
    """The second request finds it, the third one begins with it."""
    (folder, model), rng = tiny("llama"), random.Random(1)
    with served(folder, model, {"budget": 128, "policy": "key_norm"} | options, **CUTTING) as server:
        system = drawn(rng, 104)
        prompts = [system + drawn(rng, 90 + 20 * number) for number in range(5)]
        reads = []
        for number, prompt in enumerate(prompts):
            given, read = _ask(server, f"r{number}", prompt, 20)
            chunks = server.record.chunks[next(name for name in server.record.chunks if name.startswith(f"r{number}-"))]
            begun = len(prompt) - read
            reads.append(begun)
            first = [] if not begun else [begun]
            wanted = answer(model, server.options, prompt, [*first, *chunks[: len(chunks) - 19]], 20)
            assert given == wanted, number
        assert reads == [0, 0, 96, 96, 96]
        server.check_blocks()


def test_the_same_prompt_again() -> None:
    (folder, model), rng = tiny("llama"), random.Random(1)
    with served(folder, model, {"budget": 128, "policy": "keydiff"}, **CUTTING) as server:
        prompt = drawn(rng, 100)
        answers, reads = zip(*(_ask(server, f"r{number}", prompt, 60) for number in range(4)), strict=True)
        assert reads == (100, 100, 4, 4)
        assert answers[0] == answers[1] == answers[2] == answers[3]
        assert list(answers[0]) == answer(model, server.options, prompt, [100], 60)


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
        chats = Chats(server, 4, 4, 40)
        chats.run(preempt_every=15)
        server.check_blocks()
        assert chats.preempted > 4 and chats.begun
        chats.check()

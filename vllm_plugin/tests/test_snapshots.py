"""Conversations: what a request held when it ended is where the next turn begins."""

import copy
import random
from typing import Any

import pytest
import torch

from alone import cache_of
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
        self.new, self._add = 0, self._manager.add_local_computed_blocks
        self._manager.add_local_computed_blocks = self._noted

    def _noted(self, request: str, blocks: Any, count: int, *args: Any) -> None:
        known = snapshots_of(self._manager.block_pool).values()
        (origin,) = [one.origin for one in known if one.blocks and one.blocks[0] is blocks[0] and one.is_whole]
        self.begun[request] = origin, count
        self._add(request, blocks, count, *args)

    def run(self) -> None:
        for chat in range(len(self._texts)):
            self._ask(chat)
        while self._server.llm.llm_engine.has_unfinished_requests():
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
            begun = self.begun.get(request)
            cache = copy.deepcopy(states[begun]) if begun else cache_of(self._server.model.config, self._server.options)
            at, given = begun[1] if begun else 0, []
            for count in self._server.record.chunks[request]:
                for stop in range(at + 1, at + count):  # within a chunk, if nothing was evicted yet
                    if (request, stop) in wanted:
                        states[request, stop] = copy.deepcopy(cache)
                        self._feed(text[at:stop], states[request, stop])
                logits = self._feed(text[at : at + count], cache)
                at += count
                if (request, at) in wanted:
                    states[request, at] = copy.deepcopy(cache)
                if at >= len(self.prompts[name]):
                    given.append(int(logits.argmax()))
            assert given == self.answers[name], name

    def _feed(self, tokens: list[int], cache: Any) -> Any:
        return self._server.model(input_ids=torch.tensor([tokens]), past_key_values=cache).logits[0, -1]


@pytest.mark.parametrize(
    ("options", "engine", "answer", "most"),
    [
        ({"policy": "keydiff"}, {}, 40, 1.25),
        ({"policy": "paged_eviction", "heads": "separate", "block_size": 4}, {}, 40, 1.25),
        ({"policy": "keydiff", "allocator": "heads:[[1.0, 0.3], [2.0, 0.7]]"}, {}, 40, 1.3),
        ({"policy": "key_norm"}, {"scheduler_cls": "hf_paged_eviction_vllm.scheduler.Scheduler"}, 8, 1.25),
        ({"policy": "keydiff"}, {"kv_cache_memory_bytes": 3 << 20, "max_num_seqs": 4}, 40, 9.0),  # the pool reuses them
    ],
)
def test_turns_go_on_from_snapshots(options: dict[str, Any], engine: dict[str, Any], answer: int, most: float) -> None:
    folder, model = tiny("llama")
    with served(folder, model, {"budget": 256} | options, max_model_len=2048, **engine) as server:
        chats = Chats(server, 6, 6, answer)
        chats.run()
        server.check_blocks()
        assert chats.begun
        assert chats.read <= most * chats.new
        chats.check()

"""Draws servers and what is asked of them, and compares every answer with `PagedEvictionCache` alone.

`python vllm_plugin/tests/draw_servers.py FIRST LAST` runs the servers of these seeds and prints each that is wrong;
with `small` behind it those with small budgets, see `server_of`.
"""

import json
import os
import random
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

import conftest  # noqa: F401  (the environment)

POLICIES = ("keydiff", "snapkv", "h2o", "key_norm", "paged_eviction", "tova")
#: Parts of scores that may be noise: a level of rounded scores is 2.4e-4.
NOISE = (0.0, 5e-7, -5e-7, 5e-6, -5e-6)
LENGTHS = (5, 20, 33, 64, 97, 110, 150, 250, 400)
#: Steps after which a server stands still.
MOST_STEPS = 3000


@dataclass
class Asked:
    """A request, one of several answers to it, or a session.

    Attributes:
        parts: the tokens of its prompt; of a session, of each prompt.
        new: tokens to generate, for each.
        own: its own options, as those of a cache.
        answers: what was generated for each prompt.
    """

    parts: list[list[int]]
    new: int
    own: dict[str, Any] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.answers) == len(self.parts) and all(len(one) == self.new for one in self.answers)

    @property
    def text(self) -> list[int]:
        """The tokens that were read: all but the last of each answer."""
        return [
            token
            for part, answer in zip(self.parts, self.answers, strict=True)
            for token in [*part, *answer[: self.new - 1]]
        ]

    @property
    def given(self) -> dict[int, int]:
        """The tokens generated, by the number of tokens read before."""
        given, read = {}, 0
        for part, answer in zip(self.parts, self.answers, strict=True):
            read += len(part)
            given |= {read + number: token for number, token in enumerate(answer)}
            read += self.new - 1
        return given


def is_right(server: Any, name: str, asked: Asked) -> bool:
    """Whether the tokens that a request was given are those of a cache alone that is fed the same chunks."""
    from alone import moved_scores

    for part in NOISE:
        with moved_scores(part):
            if _agrees(server, name, asked):
                return True
    return False


def _agrees(server: Any, name: str, asked: Asked) -> bool:
    """What a request generated before it was preempted is not compared: it was read in other chunks then."""
    from alone import cache_of, feed

    request, text, given = server.record.name(name), asked.text, asked.given
    cache, at, begun = cache_of(server.model.config, server.options | asked.own), 0, server.record.read[request]
    for count in server.record.cuts(request):
        token = feed(server.model, text[at : at + count], cache)
        at += count
        if at >= begun and given.get(at, token) != token:
            return False
    return at == len(text)


def server_of(rng: random.Random, small: bool = False) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A family of models, options of a cache and arguments of vLLM.

    Args:
        small: a small budget, so that more requests go on from snapshots beyond it.
    """
    family = rng.choice(["llama", "llama", "llama_of_four", "gemma3"])
    layers = {"llama": 2, "llama_of_four": 4, "gemma3": 2}[family]
    options: dict[str, Any] = {
        "budget": rng.choice([64, 80, 96, 128, 160]),
        "block_size": rng.choice([4, 8, 16]),
        "policy": rng.choice(POLICIES),
        "sink_tokens": rng.choice([0, 4, 16]),
        "recent_tokens": rng.choice([0, 16]),
        "heads": rng.choice(["shared", "separate"]),
        "reserve": rng.random() < 0.8,
        "snapshots": rng.random() < 0.8,
    }
    kind = rng.choice(["equal", "equal", "heads", "pyramid"])
    if kind == "heads":
        table = [[round(rng.uniform(0.05, 2.0), 2) for _ in range(2)] for _ in range(layers)]
        options |= {"allocator": "heads:" + json.dumps(table), "heads": "separate"}
    elif kind == "pyramid":
        options |= {"allocator": "pyramid"}
    engine: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice([48, 64, 128, 512]),
        "kv_cache_memory_bytes": rng.choice([6, 16, 64]) << 20,
        "max_num_seqs": rng.choice([3, 8]),
        "enable_prefix_caching": rng.random() < 0.8,
        "block_size": rng.choice([32, 32, 32, 64, 96, 128]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
    }
    if rng.random() < 0.4:
        engine["scheduler_cls"] = "hf_paged_eviction_vllm.scheduler.Scheduler"
    if small:
        family = "llama"
        options |= {"policy": "keydiff", "budget": 64, "block_size": 16, "sink_tokens": 4, "recent_tokens": 0}
        options["snapshots"] = True
        options.pop("allocator", None)
        engine |= {"enable_prefix_caching": True, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
    return family, options, engine


class Clients:
    """What is asked of a server: requests, several answers, sessions; cancels, preemptions and resets.

    Attributes:
        asked: what was asked, by name.
        sessions: those that are not done yet, with the number of prompts that were sent.
    """

    def __init__(self, server: Any, options: dict[str, Any], rng: random.Random) -> None:
        self._server, self._options, self._rng = server, options, rng
        self._begin = [rng.randrange(3, 500) for _ in range(rng.choice([40, 70, 100, 200]))]
        self.asked: dict[str, Asked] = {}
        self.sessions: dict[str, int] = {}

    def play(self, count: int) -> None:
        """So many requests come and go.

        Raises:
            RuntimeError: the server stands still.
        """
        rng, server = self._rng, self._server
        for number in range(count):
            getattr(self, rng.choice(["_request"] * 5 + ["_several", "_session"]))(number)
            for _ in range(rng.randrange(0, 12)):
                self._step()
            if rng.random() < 0.1:
                name = f"{rng.choice('rs')}{rng.randrange(0, number + 1)}"
                server.cancel(name)
                self.sessions.pop(name, None)
            if rng.random() < 0.1:
                server.preempt()
            if rng.random() < 0.05:
                server.llm.llm_engine.reset_prefix_cache()
        for _ in range(MOST_STEPS):
            if not self.sessions and not server.llm.llm_engine.has_unfinished_requests():
                return
            self._step()
        raise RuntimeError(f"The server stands still, with {sorted(self.sessions)} to come.")

    def _step(self) -> None:
        for name, tokens in self._server.step().items():
            self.asked[name].answers = [tokens]
        for name, sent in list(self.sessions.items()):
            one, given = self.asked[name], self._server.sessions[name]
            one.answers = [given[at : at + one.new] for at in range(0, len(given), one.new)]
            answered = len(given) // one.new
            if answered == len(one.parts):
                self._server.tell(name, [3], 1, last=True)
                del self.sessions[name]
            elif answered >= sent - 1 and sent < len(one.parts) and self._rng.random() < 0.1:  # at times before that
                self._server.tell(name, one.parts[sent], one.new)
                self.sessions[name] += 1

    def _request(self, number: int, several: int = 1) -> None:
        from vllm.exceptions import VLLMValidationError

        rng, name, prompt = self._rng, f"r{number}", self._text()
        own = self._own()
        extra = {f"paged_eviction_{key}": value for key, value in own.items()}
        if "protect" in own:
            extra["paged_eviction_protect"] = [list(span) for span in own["protect"]]
        new, salt = rng.choice([1, 20, 60]), "other" if rng.random() < 0.1 else None
        names = [name] if several == 1 else [f"{one}_{name}" for one in range(several)]
        try:
            self._server.add(name, prompt, new, extra, salt, n=several, priority=rng.randrange(3))
        except VLLMValidationError:
            return
        for one in names:
            self.asked[one] = Asked([prompt], new, own)

    def _several(self, number: int) -> None:
        self._request(number, self._rng.choice([2, 3]))

    def _session(self, number: int) -> None:
        rng, name = self._rng, f"s{number}"
        parts = [self._text(), *(self._drawn(rng.choice([1, 20, 70, 130])) for _ in range(rng.choice([1, 2])))]
        self.asked[name], self.sessions[name] = Asked(parts, rng.choice([1, 6, 40])), 1
        self._server.tell(name, parts[0], self.asked[name].new, priority=rng.randrange(3))

    def _drawn(self, count: int) -> list[int]:
        return [self._rng.randrange(3, 500) for _ in range(count)]

    def _text(self) -> list[int]:
        """A text of its own, one that begins like others, or one that goes on from an answer."""
        rng, text = self._rng, self._drawn(self._rng.choice(LENGTHS))
        done = [one for _, one in sorted(self.asked.items()) if one.is_complete and len(one.text) < 500]
        if done and rng.random() < 0.3:
            before = rng.choice(done)
            return [*before.text, before.answers[-1][-1], *text[:60]]
        return self._begin + text if rng.random() < 0.4 else text

    def _own(self) -> dict[str, Any]:
        rng, own = self._rng, {}
        if "allocator" not in self._options and rng.random() < 0.2:
            start, budget = rng.randrange(0, 40), self._options["budget"]
            own = {"protect": [(start, start + rng.randrange(1, 9))], "budget": budget}
            if rng.random() < 0.5 and budget > 64:
                own["budget"] = 64
        return own


def run(seed: int, count: int = 10, small: bool = False) -> list[str]:
    """What is wrong with the server of a seed; empty = nothing. `small`: see `server_of`."""
    from engines import served
    from tiny_models import tiny

    rng = random.Random(seed)
    family, options, engine = server_of(rng, small)
    folder, model = tiny(family)
    wrong: list[str] = []
    try:
        with served(folder, model, options, **engine) as server:
            clients = Clients(server, options, rng)
            clients.play(count)
            for name, one in clients.asked.items():
                if one.is_complete and not is_right(server, name, one):
                    request = server.record.name(name)
                    cuts = f"{server.record.begun[request]} + {server.record.chunks[request]}"
                    wrong.append(f"{name}: {[*map(len, one.parts)]} tokens in {cuts}, own options {one.own}")
            server.check_blocks()
    except Exception as error:
        wrong.append("".join(traceback.format_exception(error)[-3:]))
    return [f"{family} {options} {engine}: {one}" for one in wrong]


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    first, last = map(int, sys.argv[1:3])
    bad = 0
    for seed in range(first, last):
        wrong = run(seed, small="small" in sys.argv[3:])
        bad += bool(wrong)
        print(f"seed {seed}: {wrong or 'right'}", flush=True)
    print(f"{last - first} servers, {bad} wrong")
    sys.exit(bool(bad))

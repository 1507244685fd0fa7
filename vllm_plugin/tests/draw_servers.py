"""Draws servers and what is asked of them, and compares every answer with `PagedEvictionCache` alone.

`python vllm_plugin/tests/draw_servers.py FIRST LAST` runs the servers of these seeds and prints each that is wrong;
with `small` behind it those with small budgets, see `server_of`.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import conftest  # noqa: F401  (the environment)

POLICIES = ("keydiff", "snapkv", "h2o", "key_norm", "paged_eviction", "tova")
#: Parts of scores that may be noise: a level of rounded scores is 2.4e-4.
NOISE = (0.0, 5e-7, -5e-7, 5e-6, -5e-6)
LENGTHS = (5, 20, 33, 64, 97, 110, 150, 250, 400)


@dataclass
class Asked:
    """A request.

    Attributes:
        prompt: its tokens.
        own: its own options, as those of a cache.
        begun: number of its first tokens that a snapshot held.
        origin: the request whose snapshot that was; of a beginning it may be itself, before a preemption.
    """

    prompt: list[int]
    own: dict[str, Any] = field(default_factory=dict)
    begun: int = 0
    origin: str = ""


class Alone:
    """What caches alone hold, with the cuts of a server.

    Args:
        server: the server, which is done.
        asked: its requests.
        answers: those that are complete.
    """

    def __init__(self, server: Any, asked: dict[str, Asked], answers: dict[str, list[int]]) -> None:
        self._server, self._asked, self._answers = server, asked, answers

    def cuts(self, name: str) -> tuple[int, list[int]]:
        """Tokens that a request was given, and those of each of its steps, since it was last admitted."""
        chunks = next(
            chunks for request, chunks in self._server.record.chunks.items() if request.startswith(f"{name}-")
        )
        complete = len(self._asked[name].prompt) + len(self._answers[name]) - 1
        return (self._asked[name].begun if sum(chunks) < complete else 0), chunks

    def evicted(self, begun: int) -> bool:
        """Whether a snapshot of so many tokens has lost some; if not, it depends on its text alone."""
        return begun > self._server.options["budget"]

    def knows(self, name: str) -> bool:
        """Whether all requests that it goes on from are complete; of others the text is not known."""
        if name not in self._answers:
            return False
        return not self.evicted(self.cuts(name)[0]) or self.knows(self._asked[name].origin)

    def cache(self, name: str, stop: int) -> tuple[Any, Any]:
        """The cache of a request after `stop` tokens of its text, and the last logits."""
        from alone import cache_of

        asked, (begun, chunks) = self._asked[name], self.cuts(name)
        text = [*asked.prompt, *self._answers[name]]
        if self.evicted(begun):
            cache, logits = self.cache(asked.origin, begun)
        else:
            cache = cache_of(self._server.model.config, self._server.options | asked.own)
            logits = self._feed(text[:begun], cache) if begun else None
        at = begun
        for count in chunks:
            if at < stop:  # a snapshot may end within a chunk, if nothing was evicted yet
                logits = self._feed(text[at : min(at + count, stop)], cache)
                at = min(at + count, stop)
        return cache, logits

    def agrees(self, name: str, done: int) -> bool:
        """Whether the tokens behind the first `done` ones of its text are those of caches alone."""
        from alone import moved_scores

        given = self._answers[name][done - len(self._asked[name].prompt) :]
        for part in NOISE:
            with moved_scores(part):
                if self.answer(name, done) == given:
                    return True
        return False

    def answer(self, name: str, done: int) -> list[int]:
        """The tokens that follow the first `done` ones of its text."""
        cache, logits = self.cache(name, done)
        found = [int(logits.argmax())]
        while len(found) < len(self._asked[name].prompt) + len(self._answers[name]) - done:
            found.append(int(self._feed(found[-1:], cache).argmax()))
        return found

    def _feed(self, tokens: list[int], cache: Any) -> Any:
        import torch

        with torch.no_grad():
            return self._server.model(input_ids=torch.tensor([tokens]), past_key_values=cache).logits[0, -1]


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
        "block_size": rng.choice([32, 32, 64]),
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


def requests_of(rng: random.Random, options: dict[str, Any], count: int) -> Iterator[Asked]:
    """Requests, some of which begin alike; some have a budget and spans of their own."""
    system = [rng.randrange(3, 500) for _ in range(rng.choice([40, 70, 100]))]
    for _ in range(count):
        text = [rng.randrange(3, 500) for _ in range(rng.choice(LENGTHS))]
        asked = Asked(system + text if rng.random() < 0.4 else text)
        if "allocator" not in options and rng.random() < 0.2:
            start = rng.randrange(0, 40)
            asked.own = {"protect": [(start, start + rng.randrange(1, 9))], "budget": options["budget"]}
            if rng.random() < 0.5 and options["budget"] > 64:
                asked.own["budget"] = 64
        yield asked


def run(seed: int, count: int = 10, small: bool = False) -> list[str]:
    """What is wrong with the server of a seed; empty = nothing. `small`: see `server_of`."""
    from vllm.exceptions import VLLMValidationError

    from engines import served
    from hf_paged_eviction_vllm.snapshots import snapshots_of
    from hf_paged_eviction_vllm.spec import EvictionManager
    from tiny_models import tiny

    rng = random.Random(seed)
    family, options, engine = server_of(rng, small)
    folder, model = tiny(family)
    wrong: list[str] = []
    with served(folder, model, options, **engine) as server:
        asked: dict[str, Asked] = {}
        answers: dict[str, list[int]] = {}
        cancelled = set()
        (manager,) = server.record.managers
        stock = manager.add_local_computed_blocks

        def noted(request_id: str, blocks: Any, begun: int, *args: Any, **kwargs: Any) -> None:
            request = asked[request_id.rsplit("-", 1)[0]]
            request.begun = begun
            if begun:
                known = snapshots_of(manager.block_pool).values()
                request.origin = next(
                    one.origin.rsplit("-", 1)[0]
                    for one in known
                    if one.seen == begun and one.blocks[0] is blocks[0] and one.is_whole
                )
            stock(request_id, blocks, begun, *args, **kwargs)

        manager.add_local_computed_blocks = noted
        assert isinstance(manager, EvictionManager)
        for number, request in enumerate(requests_of(rng, options, count)):
            name = f"r{number}"
            if answers and rng.random() < 0.3:  # goes on from an answer
                before = rng.choice([one for one in sorted(answers) if one in asked])
                request.prompt = asked[before].prompt + answers[before] + request.prompt[:60]
            extra = {f"paged_eviction_{key}": value for key, value in request.own.items()}
            if "protect" in request.own:
                extra["paged_eviction_protect"] = [list(span) for span in request.own["protect"]]
            asked[name] = request
            try:
                server.add(name, request.prompt, rng.choice([1, 20, 60]), extra, priority=rng.randrange(3))
            except VLLMValidationError:
                del asked[name]
            for _ in range(rng.randrange(0, 12)):
                answers |= {key.split("-")[0]: tokens for key, tokens in server.step().items()}
            if rng.random() < 0.1:
                server.cancel(f"r{rng.randrange(0, number + 1)}")
                cancelled.add(name)
            if rng.random() < 0.1:
                server.preempt()
            if rng.random() < 0.05:
                server.llm.llm_engine.reset_prefix_cache()
        answers |= {key.split("-")[0]: tokens for key, tokens in server.finish().items()}
        alone = Alone(server, asked, answers)
        for name, request in asked.items():
            if name not in answers:
                continue
            begun, cuts = alone.cuts(name)
            done = next(read for key, read in server.record.read.items() if key.startswith(f"{name}-"))
            if alone.knows(name) and not alone.agrees(name, done):
                wrong.append(f"{name}: {len(request.prompt)} tokens after {begun} in {cuts}, own options {request.own}")
        try:
            server.check_blocks()
        except AssertionError as error:
            wrong.append(f"blocks: {error}")
    return [f"{family} {options} {engine}: {one}" for one in wrong]


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    first, last = map(int, sys.argv[1:3])
    bad = 0
    for seed in range(first, last):
        try:
            wrong = run(seed, small="small" in sys.argv[3:])
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        bad += bool(wrong)
        print(f"seed {seed}: {wrong or 'right'}", flush=True)
    print(f"{last - first} servers, {bad} wrong")
    sys.exit(bool(bad))

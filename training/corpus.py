"""Training text and training sequences for the embedded model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from hf_paged_eviction_eval.data import library
from hf_paged_eviction_eval.tasks import available_tasks, get_task, haystack
from hf_paged_eviction_eval.tasks.task import Facts, NeedleTask, Query
from hf_paged_eviction_eval.tasks.words import CLASSES, Words

# Tests and generated tables are no prose and no ordinary code; idlelib and lib2to3 are gone in newer versions.
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo", "ensurepip"}
_QUERIES = 12


def training_files() -> list[Path]:
    """Standard library sources, without the held-out modules."""
    root = library.root()
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    held_out = {root / f"{name}.py" for name in library.HELD_OUT}
    return [path for path in files if path not in held_out and not path.name.startswith("_sysconfigdata")]


@lru_cache(maxsize=1)
def training_texts() -> list[str]:
    """The text of every training file."""
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in training_files())
    return [text.replace("\t", "    ") for text in texts if len(text) > 200]


@dataclass
class Sequence:
    """Token ids, and for each the task it is part of an answer to ("" = context, "?" = question)."""

    ids: list[int] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)

    def add(self, ids: list[int], role: str) -> None:
        self.ids += ids
        self.roles += [role] * len(ids)


class Corpus:
    """An endless supply of training sequences, a function of its seed."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.rng = random.Random(f"train/{seed}")  # samples are seeded "task/length/seed/index": never the same
        core = tokenizer.backend_tokenizer
        self._size = len(tokenizer)
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id

        @lru_cache(maxsize=1 << 18)
        def encode(text: str) -> tuple[int, ...]:
            return tuple(core.encode(text, add_special_tokens=False).ids)

        self._encode = encode
        self._sources = [lines for text in training_texts() if len(lines := library.split_lines(text)) > 12]
        self._texts = [ids for text in training_texts() if len(ids := encode(text)) > 64]
        self._weights = [len(ids) for ids in self._texts]
        self._lines = haystack.stream(self.rng, self._sources)
        self._tasks = [task for name in available_tasks() if isinstance(task := get_task(name), NeedleTask)]
        # One answer in a sequence, where the others have up to a dozen: without a bonus it is learned last.
        self._scarce = next(task for task in self._tasks if task.name == "passkey")

    def text(self, length: int) -> Sequence:
        """A stretch of real text."""
        sequence = Sequence()
        while len(sequence.ids) < length:
            (ids,) = self.rng.choices(self._texts, self._weights)
            start = self.rng.randrange(max(1, len(ids) - length // 2))
            sequence.add([self._bos, *ids[start : start + length]], "")
        return Sequence(sequence.ids[:length], sequence.roles[:length])

    def questions(self, length: int, load: int) -> Sequence:
        """Facts of one or more tasks in filler, then many questions about them."""
        words = Words(self.rng)
        tasks = self._choose(length)
        facts = {task.name: task.draw(self.rng, words, max(2, load // (2 if len(tasks) > 1 else 1))) for task in tasks}
        tail = self._questions(facts, length)
        needles = self._merge([list(fact.needles) for fact in facts.values()])
        budget = length - 2 - len(tail.ids) - sum(len(self._encode("\n" + needle)) for needle in needles)
        lines = haystack.fill(self._lines, lambda line: len(self._encode(line)), budget)
        depths = sorted(self.rng.random() for _ in needles)
        sequence = Sequence([self._bos], [""])
        for line in haystack.bury(lines, needles, depths):
            sequence.add(list(self._encode(line if len(sequence.ids) > 1 else line.lstrip("\n"))), "")
        sequence.add(list(self._encode("\n")), "")
        sequence.add(tail.ids, "")
        sequence.roles[-len(tail.ids) :] = tail.roles
        return sequence

    def _choose(self, length: int) -> list[NeedleTask]:
        """A long sequence is dear, so it teaches several tasks at once."""
        several = (1, 2, 3, 4) if length >= 1024 else (1, 1, 2, 3) if length >= 384 else (1,)
        tasks = self.rng.sample(self._tasks, self.rng.choice(several))
        if length >= 1024 and self.rng.random() < 0.5 and self._scarce not in tasks:
            tasks[0] = self._scarce
        return tasks

    def echo(self, length: int) -> Sequence:
        """The densest lessons in looking back: a list twice, pairs twice, or members of classes with their labels."""
        kind = self.rng.random()
        if kind < 0.3:
            return self._repeat(length)
        return self._pairs(length) if kind < 0.6 else self._classes(length)

    def _some_tokens(self, count: int) -> list[int]:
        """Task words, or anything at all, or digits: looking back must work for every token."""
        kind = self.rng.random()
        if kind < 0.5:
            return [self._encode(f" {word}")[0] for word in Words(self.rng).take(count)]
        if kind < 0.75:
            return self.rng.sample(range(self._eos + 1, self._size), count)
        digits = [self._encode(digit)[0] for digit in "0123456789"]
        return self.rng.sample(digits, min(count, 10))

    def _repeat(self, length: int) -> Sequence:
        ids = self._some_tokens(self.rng.randint(3, max(3, length // 2)))
        sequence = Sequence([self._bos], [""])
        sequence.add(ids, "?")
        sequence.add(ids, "echo")
        return sequence

    def _pairs(self, length: int) -> Sequence:
        """Keys and values, then the same pairs in another order."""
        count = self.rng.randint(2, max(2, length // 8))
        keys = [self._encode(f" {word}")[0] for word in Words(self.rng).take(count)]
        pairs = list(zip(keys, self._some_tokens(count), strict=False))
        sign, end = self._signs()
        sequence = Sequence([self._bos], [""])
        for role in ("?", "echo"):
            for key, value in pairs:
                sequence.add([key, *sign], "?")
                sequence.add([value], role)
                sequence.add(end, "?")
            self.rng.shuffle(pairs)
        return sequence

    def _classes(self, length: int) -> Sequence:
        """Few-shot examples one after the other; each is asked once its class has been seen."""
        classes = self.rng.sample(sorted(CLASSES), 2 if length < 64 else self.rng.randint(2, 4))
        known = self.rng.random() < 0.4  # the label is the name of the class: what the words mean
        labels = dict(zip(classes, classes if known else Words(self.rng).take(len(classes)), strict=True))
        shown = [(word, name) for name in classes for word in CLASSES[name]]
        self.rng.shuffle(shown)
        sign, end = self._signs()
        sequence, seen = Sequence([self._bos], [""]), set[str]()
        for word, name in shown[: max(4, length // 4)]:
            sequence.add([*self._encode(f" {word}"), *sign], "?")
            sequence.add(list(self._encode(f" {labels[name]}")), "class" if known or name in seen else "?")
            sequence.add(end, "?")
            seen.add(name)
        return sequence

    def _signs(self) -> tuple[list[int], list[int]]:
        """What stands between key and value, and what after the value."""
        sign, end = self.rng.choice((" =", " is", " ->", ":")), self.rng.choice((".", "\n", ","))
        return list(self._encode(sign)), list(self._encode(end))

    def _questions(self, facts: dict[str, Facts], length: int) -> Sequence:
        """Questions and answers in random order, at most a third of the sequence."""
        queries = [(name, query) for name, fact in facts.items() for query in fact.queries]
        self.rng.shuffle(queries)
        tail = Sequence()
        for name, query in queries[:_QUERIES]:
            if tail.ids and len(tail.ids) > length // 3 - 32:
                break
            self._ask(tail, name, query)
        return tail

    def _ask(self, tail: Sequence, name: str, query: Query) -> None:
        tail.add(list(self._encode(query.question)), "?")
        tail.add([*self._encode(query.completion), self._eos], name)

    def _merge(self, chains: list[list[str]]) -> list[str]:
        """One list in which each chain keeps its order."""
        owners = [owner for owner, chain in enumerate(chains) for _ in chain]
        self.rng.shuffle(owners)
        supply = [iter(chain) for chain in chains]
        return [next(supply[owner]) for owner in owners]

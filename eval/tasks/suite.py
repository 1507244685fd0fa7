"""The suite: facts hidden in text, and questions about them. Its seventh task, `next_line`, is none of these."""

from __future__ import annotations

import random
import re

from .sample import Sample
from .task import Facts, NeedleTask, Query, first_line
from .words import CLASSES, Words

_PAIRS = 4
_HOPS = (2, 3)
_CHAINS = 3
_CLASSES = 4
_SPAN_WORDS = 12


class Passkey(NeedleTask):
    """Passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300)."""

    name = "passkey"
    description = "Find a five-digit key hidden once, at any depth, in filler text."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        # No digit twice: the task is about finding the key, not about counting repetitions.
        key = "".join(rng.sample("0123456789", 5))
        query = Query("Which passkey opens the vault?", " The vault opens with passkey", f" {key}", key, (0,))
        return Facts((f"The vault opens with passkey {key}.",), (query,))

    def score(self, sample: Sample, prediction: str) -> float:
        return _first_is(r"\d+", prediction, sample)


class KvRecall(NeedleTask):
    """One fact among a few of its kind (as in needle-in-a-haystack with distractors, RULER, arXiv 2404.06654)."""

    name = "kv_recall"
    description = "Recall the code word of one name; three other names have codes too."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        count = min(_PAIRS, load)
        keys, values = words.take(count), words.take(count)
        return _recall(rng, keys, values, "The code of {} is {}.", "What is the code of {}?", " The code of {} is")

    def score(self, sample: Sample, prediction: str) -> float:
        return _first_is(r"\w+", prediction, sample)


class KvRecallMany(NeedleTask):
    """One of many facts of the same kind, with a value of two words (multi-key retrieval, RULER, arXiv 2404.06654)."""

    name = "kv_recall_many"
    description = "Recall the two-word value of one register out of many; the score is the share of words right."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        keys, left, right = words.take(load), words.take(load), words.take(load)
        values = [f"{a} {b}" for a, b in zip(left, right, strict=True)]
        return _recall(rng, keys, values, "Register {} = {}", "What is in register {}?", " Register {} =")

    def score(self, sample: Sample, prediction: str) -> float:
        return _words_in_place(prediction, sample)


def _recall(rng: random.Random, keys: list[str], values: list[str], needle: str, ask: str, cue: str) -> Facts:
    """A fact for each key, and a question about each."""
    pairs = list(zip(keys, values, strict=True))
    queries = [
        Query(ask.format(key), cue.format(key), f" {value}", value, (index,))
        for index, (key, value) in enumerate(pairs)
    ]
    rng.shuffle(queries)
    return Facts(tuple(needle.format(*pair) for pair in pairs), tuple(queries))


class VariableTracking(NeedleTask):
    """Follow a chain of assignments (variable tracking, RULER, arXiv 2404.06654)."""

    name = "variable_tracking"
    description = "Trace a variable through two or three assignments to its number; two other chains distract."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        chains = max(1, min(_CHAINS, load // 2))
        hops = rng.choice(_HOPS if load > 2 else (1,))
        # First digits differ, so that the first digit already says which chain was followed.
        tens, ones = rng.sample("123456789", chains), rng.sample("123456789", chains)
        numbers = [a + b for a, b in zip(tens, ones, strict=True)]
        names = [words.take(hops + 1) for _ in range(chains)]
        needles, homes = _interleave(rng, [_assignments(n, v) for n, v in zip(names, numbers, strict=True)])
        queries = [_traced(n, v, home) for n, v, home in zip(names, numbers, homes, strict=True)]
        rng.shuffle(queries)
        return Facts(tuple(needles), tuple(queries))

    def score(self, sample: Sample, prediction: str) -> float:
        """The last number on the first line: a chain may be written out before it."""
        found = re.findall(r"\d+", first_line(prediction))
        return float(bool(found) and found[-1] == sample.answers[0])


def _assignments(names: list[str], number: str) -> list[str]:
    """A chain of assignments, first the number, then each variable from the one before."""
    values = [number, *names]
    return [f"let {name} = {value}" for name, value in zip(names, values[:-1], strict=True)]


def _traced(names: list[str], number: str, home: tuple[int, ...]) -> Query:
    last, *rest = reversed(names)
    completion = "".join(f" {value} =" for value in rest) + f" {number}"
    return Query(f"Trace {last} back to its number.", f" let {last} =", completion, number, home, {"hops": len(rest)})


def _interleave(rng: random.Random, chains: list[list[str]]) -> tuple[list[str], list[tuple[int, ...]]]:
    """All lines in one list, each chain in its own order, and where each chain went."""
    owners = [owner for owner, chain in enumerate(chains) for _ in chain]
    rng.shuffle(owners)
    supply = [iter(chain) for chain in chains]
    homes = [tuple(place for place, who in enumerate(owners) if who == owner) for owner in range(len(chains))]
    return [next(supply[owner]) for owner in owners], homes


class FewShot(NeedleTask):
    """In-context classification with arbitrary labels (label remapping as in Wei et al. 2023, arXiv 2303.03846)."""

    name = "few_shot"
    chat = False
    description = "Label a new word by its class, when each class was given an arbitrary label in scattered examples."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        classes = rng.sample(sorted(CLASSES), max(2, min(_CLASSES, load // 2)))
        shots = max(1, min(6, load // len(classes)))
        labels = dict(zip(classes, words.take(len(classes)), strict=True))
        members = {name: rng.sample(CLASSES[name], shots + 2) for name in classes}
        shown = [(word, name) for name in classes for word in members[name][:shots]]
        asked = [(word, name) for name in classes for word in members[name][shots:]]
        rng.shuffle(shown)
        rng.shuffle(asked)
        needles = tuple(f"Example: {word} -> {labels[name]}" for word, name in shown)
        homes = {name: tuple(i for i, (_, owner) in enumerate(shown) if owner == name) for name in classes}
        facts = {name: {"classes": len(classes), "shots": len(homes[name])} for name in classes}
        queries = (
            Query("", f"Example: {word} ->", f" {labels[name]}", labels[name], homes[name], {**facts[name]})
            for word, name in asked
        )
        return Facts(needles, tuple(queries))

    def score(self, sample: Sample, prediction: str) -> float:
        return _first_is(r"\w+", prediction, sample)


class SpanCopy(NeedleTask):
    """Copy a marked span word for word."""

    name = "span_copy"
    description = "Copy twelve random words that stand behind a marker; the score is the share of words in place."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        count, length = max(1, min(3, load // 8)), max(3, min(_SPAN_WORDS, load))
        length = _SPAN_WORDS if load >= 8 else length
        markers = words.take(count)
        spans = [" ".join(words.take(length)) for _ in markers]
        needles = tuple(f"Span {marker}: {span}." for marker, span in zip(markers, spans, strict=True))
        queries = [
            Query(f"Copy the span named {marker}.", f" Span {marker}:", f" {span}.", span, (index,), {"words": length})
            for index, (marker, span) in enumerate(zip(markers, spans, strict=True))
        ]
        rng.shuffle(queries)
        return Facts(needles, tuple(queries))

    def score(self, sample: Sample, prediction: str) -> float:
        return _words_in_place(first_line(prediction), sample)


def _first_is(pattern: str, prediction: str, sample: Sample) -> float:
    """Whether the first part of a prediction that looks like an answer is the right one."""
    found = re.search(pattern, prediction)
    return float(found is not None and found.group() == sample.answers[0])


def _words_in_place(prediction: str, sample: Sample) -> float:
    """The share of the words of the answer that stand at their place."""
    wanted = sample.answers[0].split()
    said: list[str] = re.findall(r"\w+", prediction)
    return sum(a == b for a, b in zip(wanted, said)) / len(wanted)  # noqa: B905 - a short answer loses words

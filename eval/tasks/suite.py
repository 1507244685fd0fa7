"""The suite: facts hidden in text, and questions about them. Its seventh task, `next_line`, is none of these."""

from __future__ import annotations

import random

from .next_line import NEXT_LINE
from .task import Facts, NeedleTask, Query, Task
from .words import CLASSES, Words

_PAIRS = 4
_HOPS = (2, 3)
_CHAINS = 3
_CLASSES = 4
_SPAN_WORDS = 12


def _passkey(rng: random.Random, words: Words, load: int) -> Facts:
    # No digit twice: the task is about finding the key, not about counting repetitions.
    key = "".join(rng.sample("0123456789", 5))
    query = Query("Which passkey opens the vault?", " The vault opens with passkey", f" {key}", key, (0,))
    return Facts((f"The vault opens with passkey {key}.",), (query,))


def _kv_recall(rng: random.Random, words: Words, load: int) -> Facts:
    count = min(_PAIRS, load)
    keys, values = words.take(count), words.take(count)
    return _recall(rng, keys, values, "The code of {} is {}.", "What is the code of {}?", " The code of {} is")


def _kv_recall_many(rng: random.Random, words: Words, load: int) -> Facts:
    keys, left, right = words.take(load), words.take(load), words.take(load)
    values = [f"{a} {b}" for a, b in zip(left, right, strict=True)]
    return _recall(rng, keys, values, "Register {} = {}", "What is in register {}?", " Register {} =")


def _recall(rng: random.Random, keys: list[str], values: list[str], needle: str, ask: str, cue: str) -> Facts:
    """A fact for each key, and a question about each."""
    pairs = list(zip(keys, values, strict=True))
    queries = [
        Query(ask.format(key), cue.format(key), f" {value}", value, (index,))
        for index, (key, value) in enumerate(pairs)
    ]
    rng.shuffle(queries)
    return Facts(tuple(needle.format(*pair) for pair in pairs), tuple(queries))


def _variable_tracking(rng: random.Random, words: Words, load: int) -> Facts:
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


def _few_shot(rng: random.Random, words: Words, load: int) -> Facts:
    classes = rng.sample(sorted(CLASSES), max(2, min(_CLASSES, load // 2)))
    shots = max(1, min(6, load // len(classes)))
    labels = dict(zip(classes, words.take(len(classes)), strict=True))
    members = {name: rng.sample(CLASSES[name], shots + 2) for name in classes}
    shown = [(word, name) for name in classes for word in members[name][:shots]]
    questions = [(word, name) for name in classes for word in members[name][shots:]]
    rng.shuffle(shown)
    rng.shuffle(questions)
    needles = tuple(f"Example: {word} -> {labels[name]}" for word, name in shown)
    homes = {name: tuple(i for i, (_, owner) in enumerate(shown) if owner == name) for name in classes}
    queries = (
        Query(
            ask="",
            cue=f"Example: {word} ->",
            completion=f" {labels[name]}",
            answer=labels[name],
            needles=homes[name],
            metadata={"classes": len(classes), "shots": len(homes[name])},
        )
        for word, name in questions
    )
    return Facts(needles, tuple(queries))


def _span_copy(rng: random.Random, words: Words, load: int) -> Facts:
    count = max(1, min(3, load // 8))
    length = _SPAN_WORDS if load >= 8 else max(3, min(_SPAN_WORDS, load))
    markers = words.take(count)
    spans = [" ".join(words.take(length)) for _ in markers]
    needles = tuple(f"Span {marker}: {span}." for marker, span in zip(markers, spans, strict=True))
    queries = [
        Query(f"Copy the span named {marker}.", f" Span {marker}:", f" {span}.", span, (index,), {"words": length})
        for index, (marker, span) in enumerate(zip(markers, spans, strict=True))
    ]
    rng.shuffle(queries)
    return Facts(needles, tuple(queries))


#: Passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300).
PASSKEY = NeedleTask(
    "passkey", "Find a five-digit key hidden once, at any depth, in filler text.", "first_number", _passkey
)
#: One fact among a few of its kind (as in needle-in-a-haystack with distractors, RULER, arXiv 2404.06654).
KV_RECALL = NeedleTask(
    "kv_recall", "Recall the code word of one name; three other names have codes too.", "first_word", _kv_recall
)
#: One of many facts of the same kind, with a value of two words (multi-key retrieval, RULER).
KV_RECALL_MANY = NeedleTask(
    "kv_recall_many",
    "Recall the two-word value of one register out of many; the score is the share of words right.",
    "words_in_place",
    _kv_recall_many,
)
#: Follow a chain of assignments (variable tracking, RULER).
VARIABLE_TRACKING = NeedleTask(
    "variable_tracking",
    "Trace a variable through two or three assignments to its number; two other chains distract.",
    "last_number",
    _variable_tracking,
)
#: In-context classification with arbitrary labels (label remapping as in Wei et al. 2023, arXiv 2303.03846).
FEW_SHOT = NeedleTask(
    "few_shot",
    "Label a new word by its class, when each class was given an arbitrary label in scattered examples.",
    "first_word",
    _few_shot,
    chat=False,
)
SPAN_COPY = NeedleTask(
    "span_copy",
    "Copy twelve random words that stand behind a marker; the score is the share of words in place.",
    "line_in_place",
    _span_copy,
)
SUITE: tuple[Task, ...] = (
    PASSKEY, KV_RECALL, KV_RECALL_MANY, VARIABLE_TRACKING, FEW_SHOT, SPAN_COPY, NEXT_LINE
)  # fmt: skip

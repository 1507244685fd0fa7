"""Filler text: the hay in which the tasks hide their needles."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from ..data import library

_NOUNS = (
    "teacher farmer doctor child neighbor student painter visitor driver writer road house window door letter story "
    "paper morning evening room town school street field wall roof corner picture question answer village office"
).split()
_ADJECTIVES = (
    "old young quiet small large bright dark early late warm cold narrow wide empty busy tired happy careful simple "
    "strange"
).split()
_VERBS = (
    "watched followed remembered found left described crossed opened closed painted visited carried repaired noticed "
    "forgot liked expected counted avoided reached"
).split()
_ADVERBS = "slowly again often quietly later soon once twice together alone".split()
_TIMES = ("in the end", "after lunch", "on Monday", "last week", "before noon", "at night", "for a while", "as usual")
_SHORT = ("Time went on.", "Nobody came.", "All was calm.", "It was late.", "So it went.", "Hm.")


def vocabulary() -> list[str]:
    """Words of the grammar as they stand inside a sentence."""
    phrases = " ".join((*_TIMES, "the a an every another that")).split()
    return sorted({*_NOUNS, *_ADJECTIVES, *_VERBS, *_ADVERBS, *phrases})


Cost = Callable[[str], int]


def _phrase(rng: random.Random) -> str:
    article = rng.choice(("the", "a", "every", "another", "that"))
    adjective = f"{rng.choice(_ADJECTIVES)} " if rng.random() < 0.5 else ""
    words = f"{adjective}{rng.choice(_NOUNS)}"
    return f"{'an' if article == 'a' and words[0] in 'aeiou' else article} {words}"


def sentence(rng: random.Random) -> str:
    """A sentence from a small grammar."""
    text = f"{_phrase(rng)} {rng.choice(_VERBS)} {_phrase(rng)}"
    if rng.random() < 0.4:
        text += f" {rng.choice(_ADVERBS)}"
    if rng.random() < 0.3:
        text = f"{rng.choice(_TIMES)}, {text}"
    return text[0].upper() + text[1:] + "."


def _grammar_run(rng: random.Random) -> list[str]:
    return ["\n" + " ".join(sentence(rng) for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(2, 8))]


def _library_run(rng: random.Random, sources: Sequence[Sequence[str]] | None) -> list[str]:
    lines = rng.choice(sources) if sources else library.filler_lines(rng.choice(library.FILLER))
    start = rng.randrange(max(1, len(lines) - 12))
    return list(lines[start : start + rng.randint(2, 10)])


def stream(rng: random.Random, sources: Sequence[Sequence[str]] | None = None) -> Iterator[str]:
    """Endless filler lines, each with the newline before it: short runs of grammar and of real text in turns.

    `sources` are lists of lines to take real text from instead of the fixed standard library modules.
    """
    while True:
        yield from _library_run(rng, sources) if rng.random() < 0.5 else _grammar_run(rng)


def sentences(rng: random.Random) -> Iterator[str]:
    """Endless lines of made-up sentences alone, each with the newline before it."""
    while True:
        yield from _grammar_run(rng)


def fill(lines: Iterator[str], cost: Cost, budget: int) -> list[str]:
    """Lines that together cost at most `budget`, and nearly as much."""
    taken: list[str] = []
    misses = 0
    while misses < 8:
        line = next(lines)
        price = cost(line)
        if price > budget:
            misses += 1
            continue
        taken.append(line)
        budget -= price
    for line in ("\n" + short for short in _SHORT * 3):
        if (price := cost(line)) <= budget:
            taken.append(line)
            budget -= price
    return taken


def bury(lines: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """`lines` with each needle put in at its depth in [0, 1]; needles keep their order when `depths` ascend."""
    starts = list(accumulate(map(len, lines), initial=0))  # in characters: lines differ in length
    places: dict[int, list[str]] = {}
    for needle, depth in zip(needles, depths, strict=True):
        places.setdefault(bisect_left(starts, depth * starts[-1]), []).append("\n" + needle)
    mixed: list[str] = []
    for index in range(len(lines) + 1):
        mixed += places.get(index, [])
        mixed += lines[index : index + 1]
    return mixed


def woven(parts: Sequence[str], needles: Sequence[str], depths: Sequence[float], joint: str) -> str:
    """The parts joined, each needle before the part at its depth in [0, 1); depths ascend."""
    mixed, start = list[str](), 0
    for text, depth in zip(needles, depths, strict=True):
        place = int(depth * len(parts))
        mixed += [*parts[start:place], text]
        start = place
    return joint.join([*mixed, *parts[start:]])


def word_stream(rng: random.Random) -> Iterator[str]:
    """Endless words of the filler text: made-up sentences and lines of the standard library in turns."""
    for line in stream(rng):
        yield from line.split()


def split_sentences(text: str) -> list[str]:
    """Sentences without the space between them: a sentence ends with `.`, `!` or `?` before a space."""
    return re.split(r"(?<=[.!?]) ", text) if text else []

"""RULER's eight needle tasks: magic numbers and uuids hidden in noise, in running text, or among their like.

As in RULER: needle, prompt, keys, values, the numbers of them, where needles may stand. Different: the running text is
the filler of this package (made-up sentences and lines of Python's standard library) instead of Paul Graham's essays,
and the words of keys are a list of its own instead of wonderwords. Keys and values asked for are never repeated, in
RULER they could be. Scores are not comparable with published ones.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .. import haystack
from ..sized import Draft, Prefix, SizedTask
from ..words import random_key

#: Shares of the text before which needles may stand: 40 of them, evenly spread.
_DEPTHS = tuple(round(place * 100 / 39) / 100 for place in range(40))

#: The noise of the simplest haystacks: a line of these again and again.
_GRASS = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")

Kind = Literal["words", "numbers", "uuids"]
Bury = Callable[[int], str]


def _random_word(kind: Kind, rng: random.Random) -> str:
    if kind == "words":
        return random_key(rng)
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def grass_lines(sentences: int) -> list[str]:
    """So many sentences, five to a line. RULER knows full lines only; here the last one may be shorter."""
    whole, rest = divmod(sentences, len(_GRASS))
    last = [" ".join(_GRASS[:rest])] if rest else []
    return [" ".join(_GRASS)] * whole + last


def _distinct(kind: Kind, rng: random.Random, count: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words[_random_word(kind, rng)] = None
    return list(words)


def needle(kind: str, key: str, value: str) -> str:
    """A sentence that hides a value."""
    return f"One of the special magic {kind} for {key} is: {value}."


@dataclass(frozen=True)
class MagicValues:
    """Needles in a haystack, and a question about some of their keys.

    Attributes:
        hay: what the needles lie in.
        key_kind: what keys look like.
        value_kind: what values look like.
        keys: how many keys have needles (in hay of needles every line has one more).
        values: needles per key.
        queries: how many keys are asked for.
    """

    hay: Literal["grass", "essay", "needles"]
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def draw(self, rng: random.Random, length: int, index: int) -> Draft:
        keys = _distinct(self.key_kind, rng, self.keys)
        values = _distinct(self.value_kind, rng, self.keys * self.values)
        owned = {key: values[at * self.values : (at + 1) * self.values] for at, key in enumerate(keys)}
        needles = {value: needle(self.value_kind, key, value) for key, mine in owned.items() for value in mine}
        wanted = rng.sample(keys, self.queries)
        answers = tuple(value for key in wanted for value in owned[key])
        hidden = list(needles.values())
        rng.shuffle(hidden)
        before, ask, cue = self._prompt(wanted)
        bury = self._bury(rng, hidden, frozenset(keys))
        return Draft(
            context=lambda units: f"{before}{bury(units)}\n",
            ask=ask,
            cue=cue,
            answers=answers,
            completion=" " + ", ".join(answers),
            facts=tuple(needles[value] for value in answers),
            metadata={"needles": len(hidden)},
        )

    def _prompt(self, wanted: list[str]) -> tuple[str, str, str]:
        """What stands before the haystack, the question after it, and what the answer begins with."""
        query = ", ".join(wanted[:-1]) + ", and " + wanted[-1] if len(wanted) > 1 else wanted[0]
        if self.queries * self.values == 1:
            kind = self.value_kind[:-1]
            a_few, are_all, are = f"A special magic {kind} is", "is", "is"
        else:
            kind = self.value_kind
            a_few, are_all, are = f"Some special magic {kind} are", "are all", "are"
        before = (
            f"{a_few} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.\n"
        )
        mentioned = f"the special magic {kind} for {query} mentioned in the provided text"
        return before, f"What {are_all} {mentioned}?", f" T{mentioned[1:]} {are}"

    def _bury(self, rng: random.Random, needles: list[str], wanted: frozenset[str]) -> Bury:
        """From units of hay to hay with the needles in it."""
        if self.hay == "essay":
            depths = sorted(rng.sample(_DEPTHS, len(needles)))
            words = Prefix(haystack.word_stream(rng))
            return lambda units: haystack.woven(haystack.split_sentences(" ".join(words(units))), needles, depths, " ")
        depths = sorted(rng.random() for _ in needles)
        if self.hay == "grass":
            return lambda units: haystack.woven(grass_lines(units), needles, depths, "\n")
        like = Prefix(self._like(rng, wanted))
        return lambda units: haystack.woven(like(units), needles, depths, "\n")

    def _like(self, rng: random.Random, wanted: frozenset[str]) -> Iterator[str]:
        """Endless needles for other keys."""
        while True:
            key, value = _random_word(self.key_kind, rng), _random_word(self.value_kind, rng)
            if key not in wanted:
                yield needle(self.value_kind, key, value)


def _task(name: str, description: str, hay: Literal["grass", "essay", "needles"], **more: Any) -> SizedTask:
    unit = {"grass": "sentences", "essay": "words", "needles": "lines"}[hay]
    draw = MagicValues(hay, **more).draw
    return SizedTask(f"ruler_niah_{name}", f"RULER: {description}", "string_match_all", draw, 128, unit)


NEEDLE_TASKS: tuple[SizedTask, ...] = (
    _task("single_1", "one magic number, in a line of noise repeated.", "grass"),
    _task("single_2", "one magic number, in running text.", "essay"),
    _task("single_3", "one magic uuid, in running text.", "essay", value_kind="uuids"),
    _task("multikey_1", "one of four magic numbers, in running text.", "essay", keys=4),
    _task("multikey_2", "one magic number, among nothing but its like.", "needles"),
    _task(
        "multikey_3",
        "the magic uuid of a uuid, among nothing but its like.",
        "needles",
        key_kind="uuids",
        value_kind="uuids",
    ),
    _task("multivalue", "four magic numbers of one key, in text.", "essay", values=4),
    _task("multiquery", "the magic numbers of four keys, in running text.", "essay", keys=4, queries=4),
)
"""In the order of the paper's table."""

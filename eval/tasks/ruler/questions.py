"""RULER's question answering: one or two documents hold the answer, all others are distractors of the same kind.

As in RULER: numbered documents in random order, a question of one hop (`qa_1`, SQuAD there) or two (`qa_2`, HotpotQA
there), 32 tokens to answer, and the score. Different: persons, towns and rivers are made up and described in a few
fixed forms, the wording of the instruction is our own, a distractor never repeats an answer, and the last one may be
cut short. This is far easier to read than an encyclopedia. Scores are not comparable with published ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from ..haystack import sentence
from ..sized import Draft, Prefix, SizedTask
from ..words import POOL

_FIRST_NAMES = tuple(
    """
    Ada Agnes Albert Alma Arthur Beatrice Bruno Carla Cecil Clara Conrad Dora Edgar Edith Elsa Emil Felix Flora Frieda
    George Greta Hanna Harold Helen Hugo Ida Ivan Jonas Julia Karl Laura Leo Louise Magnus Martha Max Nora Oscar Otto
    Paula Rosa Rufus Selma Simon Stella Thea Victor Walter Wilma
    """.split()
)
_TOWNS = ("ton", "ford", "field", "wick", "stead", "by", "ham", "worth")
_RIVERS = ("beck", "burn", "brook", "bourne", "water")
_TRADES = tuple("baker carpenter printer tailor surveyor teacher gardener mason clerk painter miller joiner".split())
_BUILDINGS = tuple("town hall, old mill, corn exchange, water tower, library, stone bridge, clock tower".split(", "))


@dataclass(frozen=True)
class _World:
    """A person, where that person was born, and the river there."""

    person: str
    town: str
    river: str

    @classmethod
    def draw(cls, rng: random.Random) -> _World:
        a, b, c = (word.capitalize() for word in rng.sample(POOL, 3))
        return cls(f"{rng.choice(_FIRST_NAMES)} {a}", b + rng.choice(_TOWNS), c + rng.choice(_RIVERS))

    def shares_a_name(self, other: _World) -> bool:
        return self.person == other.person or self.town == other.town or self.river == other.river

    def life(self, rng: random.Random) -> list[str]:
        """Sentences about the person; the first says where it was born."""
        year, years = rng.randint(1780, 1960), rng.randint(2, 40)
        return [
            f"{self.person} was born in {self.town} in {year}.",
            f"{self.person.split()[0]} worked as a {rng.choice(_TRADES)} for {years} years.",
            *(sentence(rng) for _ in range(rng.randint(1, 3))),
        ]

    def place(self, rng: random.Random) -> list[str]:
        """Sentences about the town; the first says on which river it lies."""
        year, people = rng.randint(900, 1700), rng.randint(12, 400) * 100
        return [
            f"{self.town} is a town on the river {self.river}.",
            f"It was founded in {year} and has about {people} inhabitants.",
            f"Visitors come for the {rng.choice(_BUILDINGS)}.",
            *(sentence(rng) for _ in range(rng.randint(1, 3))),
        ]


Question = tuple[list[list[str]], str, str]
"""The documents needed, the question, and its answer."""


def _draw(ask: Callable[[random.Random, _World], Question], rng: random.Random, length: int, index: int) -> Draft:
    world = _World.draw(rng)
    gold, question, answer = ask(rng, world)
    rng.shuffle(gold)
    depths = sorted(rng.random() for _ in gold)
    others = Prefix(_distractors(rng, world))

    def context(units: int) -> str:
        documents = [" ".join(text for _, text in part) for _, part in groupby(others(units), lambda item: item[0])]
        for depth, document in reversed(list(zip(depths, gold, strict=True))):
            documents.insert(int(depth * (len(documents) + 1)), " ".join(document))
        numbered = (f"Document {number}:\n{text}" for number, text in enumerate(documents, 1))
        return f"{_RULE} These are the documents.\n\n" + "\n\n".join(numbered) + "\n"

    return Draft(
        context=context,
        ask=f"{_RULE}\n\nQuestion: {question}",
        cue=" Answer:",
        answers=(answer,),
        completion=f" {answer}",
        smallest=0,
        facts=tuple(document[0] for document in gold),
        metadata={"needles": len(gold)},
    )


_RULE = "Use the documents to answer the question, with the name alone."


def _distractors(rng: random.Random, world: _World) -> Iterator[tuple[int, str]]:
    """Endless sentences, with the number of the document that each belongs to."""
    number = 0
    while True:
        other = _World.draw(rng)
        if not other.shares_a_name(world):
            for text in other.life(rng) if rng.random() < 0.5 else other.place(rng):
                yield number, text
            number += 1


def _one(rng: random.Random, world: _World) -> Question:
    if rng.random() < 0.5:
        return [world.life(rng)], f"In which town was {world.person} born?", world.town
    return [world.place(rng)], f"On which river is the town of {world.town}?", world.river


def _two(rng: random.Random, world: _World) -> Question:
    question = f"On which river is the town in which {world.person} was born?"
    return [world.life(rng), world.place(rng)], question, world.river


QUESTION_TASKS = tuple(
    SizedTask(name, f"RULER: a question that {what}.", "string_match_part", partial(_draw, ask), 32, "sentences")
    for name, what, ask in (
        ("ruler_qa_1", "one of many documents answers", _one),
        ("ruler_qa_2", "takes two of many documents to answer", _two),
    )
)

"""The documents of `long_rows.py`: running text with facts at drawn depths, and four questions of each kind.

The text is documentation of Python that `prepare` does not read. It differs a little between versions of Python, so
rows keep a digest of their document. Every fact is made up, so that no model knows it. There is no chat template.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

#: Documents are drawn from this and their index.
SEED = "long rows"
#: Tokens behind a document that a cache has to predict, and questions of each kind.
FOLLOWING, EACH = 128, 4
#: Kinds of questions, as tables name them.
KINDS = {
    "one": "one fact",
    "of12": "one of twelve",
    "words": "in other words",
    "hop": "two hops",
    "track": "tracking",
}
_NAMES = (
    "Velden Marlow Quista Tarnby Oskarina Pellworm Brixen Calder Dornach Elmira Fanoe Gimli Hekla Ivrea Jarmen Kolding "
    "Lessing Morwen Nordby Odessa"
).split()
#: A fact that nothing else resembles: its beginning, its end, and a question.
_ALONE = (
    ("The registration number of the red lighthouse is", "", "What is the registration number of the red lighthouse?"),
    ("The bronze statue in the park weighs", " grams", "How much does the bronze statue in the park weigh?"),
    ("The night train to the coast leaves with wagon", " in front", "With which wagon does the night train leave?"),
    ("The winner of the spring lottery held ticket", "", "Which ticket did the winner of the spring lottery hold?"),
)
#: A fact with a gap, and a question with the beginning of its answer in other words.
_OTHER_WORDS = (
    (
        "Visitors who want to enter the old observatory have to type {} at the door.",
        "Which code opens the door of the old observatory?\nThe code that opens the door is",
    ),
    (
        "Whoever needs the vet on a Sunday has to dial {}.",
        "What is the phone number of the animal doctor at weekends?\nAt weekends the animal doctor has the number",
    ),
    (
        "Aunt Berta paid {} crowns for her piano.",
        "How expensive was Berta's musical instrument?\nIn crowns, Berta's musical instrument cost",
    ),
    (
        "To collect the parcel from Lisbon, show the slip {}.",
        "Which receipt does one need for the package from Portugal?\nFor the package from Portugal one needs receipt",
    ),
)
_KEPT_THINGS = (
    "silver key of the library",
    "green umbrella of the school",
    "spare lamp of the station",
    "old map of the town hall",
)
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """A question about a document.

    Attributes:
        kind: one of `KINDS`.
        ask: the question and the beginning of its answer.
        answer: how the answer goes on. A cache is given its words, but for the name and the number.
        first: the name, which whoever has two facts to join must find, too; "" = none.
        number: the number.
    """

    kind: str
    ask: str
    answer: str
    first: str
    number: str

    def found(self) -> list[tuple[int, int]]:
        """Where name and number stand in the answer, `[start, end)` in characters: the model has to find them."""
        starts = [(self.answer.index(part), len(part)) for part in (self.first, self.number) if part]
        return [(start, start + size) for start, size in starts]


@dataclass(frozen=True)
class Document:
    """A text with its questions.

    Attributes:
        ids: `[1, tokens]` int64.
        following: `[1, FOLLOWING]`, how the text goes on.
        questions: `EACH` of each kind.
        facts: tokens of all facts, `[start, end)` of each.
        digest: of text, continuation and questions, 12 hexadecimal digits.
    """

    ids: Tensor
    following: Tensor
    questions: tuple[Question, ...]
    facts: tuple[tuple[int, int], ...]
    digest: str


def document(tokenizer: Any, length: int, index: int) -> Document:
    """A document of about `length` tokens.

    Raises:
        ValueError: the length is too small for the facts, or larger than the text.
    """
    draw = random.Random(f"{SEED} {length} {index}")
    loose, chains, questions = _facts(draw)
    costs = [len(_ids(tokenizer, line)) + 1 for line in (*loose, *(line for chain in chains for line in chain))]
    text, rest = _running_text(tokenizer, length - sum(costs), draw)
    lines = list(text)
    for line in loose:
        lines.insert(draw.randrange(len(lines)), line)  # a paragraph stays the last
    for chain in chains:
        places = sorted(draw.randrange(len(lines)) for _ in chain)
        for before, (place, line) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + before, line)
    whole, following = "\n\n".join(lines) + "\n\n", "\n\n".join(rest)
    opening = [token for token in tokenizer("")["input_ids"] if token != tokenizer.eos_token_id][:1]
    ids = torch.tensor([opening + _ids(tokenizer, whole)])
    after = torch.tensor([_ids(tokenizer, following)[:FOLLOWING]])
    facts = _spans(tokenizer, whole, [*loose, *(line for chain in chains for line in chain)], len(opening))
    told = "\n".join([whole, tokenizer.decode(after[0]), *(f"{one.ask}|{one.answer}" for one in questions)])
    return Document(ids, after, tuple(questions), facts, hashlib.sha256(told.encode()).hexdigest()[:12])


def _spans(tokenizer: Any, whole: str, lines: list[str], before: int) -> tuple[tuple[int, int], ...]:
    """The tokens of lines of a text, in their order, with `before` tokens before the text."""
    offsets = tokenizer(whole, add_special_tokens=False, verbose=False, return_offsets_mapping=True)["offset_mapping"]
    starts, ends = zip(*offsets, strict=True)
    places = sorted((whole.index(f"{line}\n"), len(line)) for line in lines)
    return tuple((before + bisect_right(ends, at), before + bisect_left(starts, at + size)) for at, size in places)


def _facts(draw: random.Random) -> tuple[list[str], list[list[str]], list[Question]]:
    """Facts that may stand anywhere, chains of facts in their order, and questions."""
    loose: list[str] = []
    questions: list[Question] = []

    def plain(kind: str, ask: str, number: str) -> None:
        questions.append(Question(kind, ask, f" {number}", "", number))

    for front, end, question in _ALONE:
        number = _number(draw)
        loose.append(f"{front} {number}{end}.")
        plain("one", f"{question}\n{front}", number)
    names = draw.sample(_NAMES, 12 + EACH + 2)
    keys = {name: _number(draw) for name in names[:12]}
    loose += [f"The secret passkey of {name} is {key}." for name, key in keys.items()]
    for name in draw.sample(names[:12], EACH):
        plain("of12", f"What is the secret passkey of {name}?\nThe secret passkey of {name} is", keys[name])
    for fact, ask in _OTHER_WORDS:
        number = _number(draw)
        loose.append(fact.format(number))
        plain("words", ask, number)
    houses = {name: _number(draw) for name in names[12:]}  # two keep nothing
    loose += [f"The house of {name} has the number {number}." for name, number in houses.items()]
    for thing, name in zip(_KEPT_THINGS, houses, strict=False):
        loose.append(f"The {thing} is kept by {name}.")
        ask = (
            f"What is the number of the house of the person who keeps the {thing}? First name the person, then the "
            f"number.\nThe {thing} is kept by"
        )
        answer = f" {name}, and the house of {name} has the number {houses[name]}"
        questions.append(Question("hop", ask, answer, name, houses[name]))
    chains = []
    variables = draw.sample([a + b + c for a in _LETTERS for b in _LETTERS for c in _LETTERS], 3 * EACH)
    for at in range(0, 3 * EACH, 3):
        first, second, third = variables[at : at + 3]
        number = _number(draw)
        chains.append([f"VAR {first} = {number}.", f"VAR {second} = VAR {first}.", f"VAR {third} = VAR {second}."])
        ask = f"Which number does VAR {second} have? Follow the assignments.\nVAR {second} = VAR"
        questions.append(Question("track", ask, f" {first} = {number}", first, number))
    draw.shuffle(loose)
    return loose, chains, questions


def _number(draw: random.Random) -> str:
    return "".join(draw.choice("123456789") for _ in range(5))


def _running_text(tokenizer: Any, tokens: int, draw: random.Random) -> tuple[list[str], list[str]]:
    """Paragraphs of a text, and those that follow."""
    paragraphs = _paragraphs()
    costs = [len(_ids(tokenizer, paragraph)) + 1 for paragraph in paragraphs]
    if not max(costs) < tokens < sum(costs) - 2 * FOLLOWING:
        raise ValueError(f"no document has {tokens} tokens beside its facts: ask for another length")
    last, behind = len(costs), 0
    while behind < tokens + 2 * FOLLOWING:  # the last start with enough behind it
        last -= 1
        behind += costs[last]
    start = draw.randrange(last + 1)
    end, size = start, 0
    while size + costs[end] <= tokens:
        size += costs[end]
        end += 1
    return list(paragraphs[start:end]), list(paragraphs[end:])


@lru_cache(maxsize=1)
def _paragraphs() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    behind = whole[len(whole) * 11 // 20 :]  # `prepare` reads what lies before
    return tuple(part.strip("\n") for part in behind.split("\n\n") if 40 < len(part) < 900)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

"""The texts for measuring a model: text that goes on, and text with made-up facts and questions about them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_THINGS = "harbour lantern archive orchard tunnel foundry glacier library windmill chapel quarry greenhouse".split()
_KINDS = "northern silver hidden ancient crooked amber quiet marble western crimson hollow upper".split()
#: Facts of a text that are asked for, of which every other one is long.
_ASKED = 4


@dataclass(frozen=True)
class Passage:
    """A text with its continuation, and questions about it.

    Attributes:
        context: `[1, tokens]` int64.
        continuation: `[1, tokens]`, how the text goes on; None if there is none.
        questions: `[1, tokens]` each, of the same length, with the beginning of the answer; about some of many facts,
            which share the budget, or about one, which nothing in the text resembles.
    """

    context: Tensor
    continuation: Tensor | None
    questions: tuple[Tensor, ...] = ()


def passages(tokenizer: Any, text: str, length: int, going_on: int, facts: int, use: str = "both") -> Iterator[Passage]:
    """Cut a text into passages, always the same ones.

    Args:
        length: approximate number of tokens of a context.
        going_on: number of tokens of a continuation.
        facts: number of facts in every other context, the first one too; the others have one.
        use: "text" = none has facts, and all go on; "questions" = none goes on; "both" = those with one fact go on.
    """
    draw = random.Random(0)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    opening = [token for token in tokenizer("")["input_ids"] if token != tokenizer.eos_token_id][:1]
    for at, start in enumerate(range(0, len(ids) - length - going_on, length)):
        window, rest = ids[start : start + length], one_row(ids[start + length : start + length + going_on])
        if use == "text":
            yield Passage(one_row(opening + window), rest)
            continue
        passage = _with_facts(tokenizer, opening, tokenizer.decode(window), 1 if at % 2 else facts, draw)
        yield replace(passage, continuation=rest) if at % 2 and use == "both" else passage


def _with_facts(tokenizer: Any, opening: list[int], text: str, count: int, draw: random.Random) -> Passage:
    """Insert facts at random places of a text: short ones, and long ones, of which more tokens have to be kept."""
    named = draw.sample([f"{kind} {thing}" for kind in _KINDS for thing in _THINGS], count)
    facts = [_fact(name, at % 2 == 1, draw) for at, name in enumerate(named)]
    lines = text.split("\n")
    places = sorted(draw.sample(range(len(lines)), min(count, len(lines))))
    places += [len(lines)] * (count - len(places))
    for place, (_, statement) in sorted(zip(places, facts, strict=True), reverse=True):
        lines.insert(place, statement)

    def encode(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"])

    questions = [encode(question) for question, _ in facts[:_ASKED]]
    longest = max(map(len, questions))
    # Of equal length they are rows of one batch without padding: the line break before a shorter one is repeated.
    equal = [question[:1] * (longest - len(question)) + question for question in questions]
    return Passage(one_row(opening + encode("\n".join(lines))), None, tuple(map(one_row, equal)))


def _fact(name: str, is_long: bool, draw: random.Random) -> tuple[str, str]:
    """A question, and the statement that answers it."""
    if is_long:
        what, answer = "serial number", "-".join(f"{draw.randrange(16**4):04x}" for _ in range(4))
    else:
        what, answer = "access code", str(draw.randrange(10_000, 100_000))
    return f"\n\nWhat is the {what} of the {name}? It is", f"The {what} of the {name} is {answer}."


def one_row(ids: Sequence[int]) -> Tensor:
    """`[1, tokens]` int64."""
    return torch.tensor([ids], device="cpu")


def documentation() -> str:
    """The documentation of Python that comes with every Python: prose, examples and tables."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))

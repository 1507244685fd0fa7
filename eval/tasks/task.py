"""What a task is, and the shape that all needle tasks share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from . import haystack
from .sample import Sample
from .words import Words

Tokenizer = Any  # a Hugging Face tokenizer: PreTrainedTokenizerBase moves between versions, so it is not named here

SPARE_TOKENS = 3  # room to generate beyond the answer itself: an end mark, a space, a full stop


@dataclass(frozen=True)
class Query:
    """A question, the text that continues it, and the needles (by index) that hold the answer."""

    question: str
    completion: str
    answer: str
    needles: tuple[int, ...]
    metadata: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """Lines to hide in a haystack, in order, and what can be asked about them."""

    needles: tuple[str, ...]
    queries: tuple[Query, ...]


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Tokens of `text`, no special ones added."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def special_tokens(tokenizer: Tokenizer) -> int:
    """Tokens that the tokenizer adds to any text (a BOS, mostly)."""
    return len(tokenizer("")["input_ids"])


def first_line(prediction: str) -> str:
    """The part of a generated text that counts: its first line with anything on it."""
    return prediction.strip().split("\n", 1)[0].strip()


def default_load(length: int) -> int:
    """How many needle lines a task of this many tokens has, roughly: more in longer prompts, up to 24."""
    return max(4, min(24, length // 32))


class Task(ABC):
    """A kind of question. Tasks hold no state: a sample is a function of (tokenizer, length, index, seed)."""

    name: str
    description: str

    @abstractmethod
    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0) -> Sample:
        """Sample `index`: prompt and answer together take at most `length` tokens, and nearly as many."""

    @abstractmethod
    def score(self, sample: Sample, prediction: str) -> float:
        """How right `prediction`, the text generated after the prompt, is: from 0 to 1."""

    def _rng(self, length: int, index: int, seed: int) -> random.Random:
        # A string seed is hashed with SHA-512, so it is the same on every machine and Python version.
        return random.Random(f"{self.name}/{length}/{seed}/{index}")

    def _id(self, length: int, index: int, seed: int) -> str:
        return f"{self.name}/{length}/{seed}/{index}"


class NeedleTask(Task):
    """Facts hidden in a haystack. A subclass says which facts, and how an answer is scored."""

    @abstractmethod
    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        """Random facts of about `load` lines; the sample asks the first query, training asks all of them."""

    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0) -> Sample:
        rng = self._rng(length, index, seed)
        facts = self.draw(rng, Words(rng), default_load(length))
        query = facts.queries[0]
        new_tokens = count_tokens(tokenizer, query.completion) + SPARE_TOKENS
        budget = length - special_tokens(tokenizer) - new_tokens - count_tokens(tokenizer, query.question)
        context = self._context(tokenizer, rng, facts, budget, index)
        return Sample(
            id=self._id(length, index, seed),
            task=self.name,
            context=context,
            question=query.question,
            answers=(query.answer,),
            max_new_tokens=new_tokens,
            metadata=query.metadata | _where(context, facts, query),
        )

    def _context(self, tokenizer: Tokenizer, rng: random.Random, facts: Facts, budget: int, index: int) -> str:
        def cost(text: str) -> int:
            return count_tokens(tokenizer, text)

        spare = budget - cost("\n".join(("", *facts.needles, "")))
        if spare < 0:
            raise ValueError(
                f"task {self.name!r} does not fit: its facts and question take {-spare} tokens more than the length "
                f"asked for; ask for a length of at least {-spare} tokens more"
            )
        # Lines may take a token or two more together than apart: rather leave them room than lose a line below.
        lines = haystack.fill(haystack.stream(rng), cost, spare - 2)
        depths = sorted(rng.random() for _ in facts.needles)
        if len(depths) == 1:
            depths = [(index % 10 + rng.random()) / 10]  # one needle: any ten samples in a row cover every depth
        while True:
            context = "".join(haystack.bury(lines, facts.needles, depths)).lstrip("\n") + "\n"
            if cost(context) <= budget:
                return context
            lines.pop()


def _where(context: str, facts: Facts, query: Query) -> dict[str, float | int | str]:
    """Depth of the earliest needle of the answer, as a share of the context, and the number of needles."""
    start = min(context.index(facts.needles[needle]) for needle in query.needles)
    return {"depth": round(start / len(context), 4), "needles": len(facts.needles)}

"""What a task is, and the shape that all needle tasks share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ..data.prompting.chat_template import render, takes_turns
from . import haystack
from .sample import Sample
from .words import Words

Tokenizer = Any  # a Hugging Face tokenizer: PreTrainedTokenizerBase moves between versions, so it is not named here

SPARE_TOKENS = 3  # room to generate beyond the answer itself: an end mark, a space, a full stop
CHAT_SPARE_TOKENS = 8  # the same in a chat, where a model goes on in a sentence of its own
_SEAMS = 4  # tokens that a chat may have more than its parts have


@dataclass(frozen=True)
class Query:
    """A question, the words that begin the answer, the text that continues them, and the needles that hold it.

    Attributes:
        ask: the question; empty where the cue says it all.
        cue: what the answer begins with, as it follows the question in plain text.
        completion: the text that goes on after the cue.
        answer: what is compared.
        needles: by index.
    """

    ask: str
    cue: str
    completion: str
    answer: str
    needles: tuple[int, ...]
    metadata: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """Both as plain text."""
        return self.ask + self.cue


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


def taken(tokenizer: Tokenizer, ask: str, cue: str, chat: bool) -> int:
    """Tokens of a prompt besides the context, special ones included."""
    if not chat:
        return special_tokens(tokenizer) + count_tokens(tokenizer, ask + cue)
    return count_tokens(tokenizer, ask) + count_tokens(tokenizer, cue) + chat_tokens(tokenizer)


def chat_tokens(tokenizer: Tokenizer) -> int:
    """Tokens that the tokenizer's chat template adds to a message of the user and the beginning of an answer."""
    if not takes_turns(tokenizer):
        return 0
    return count_tokens(tokenizer, render("a", tokenizer)) + _SEAMS


def first_line(prediction: str) -> str:
    """The part of a generated text that counts: its first line with anything on it."""
    return prediction.strip().split("\n", 1)[0].strip()


def answer_room(tokenizer: Tokenizer, completion: str, chat: bool) -> int:
    """Tokens that an answer may take."""
    return count_tokens(tokenizer, completion) + (CHAT_SPARE_TOKENS if chat else SPARE_TOKENS)


def question_fields(ask: str, cue: str, chat: bool) -> dict[str, Any]:
    """The fields of a sample that say what is asked, and how."""
    return {"question": ask, "cue": cue, "chat": True} if chat else {"question": ask + cue}


def default_load(length: int) -> int:
    """How many needle lines a task of this many tokens has, roughly: more in longer prompts, up to 24."""
    return max(4, min(24, length // 32))


class Task(ABC):
    """A kind of question. Tasks hold no state: a sample is a function of (tokenizer, length, index, seed)."""

    name: str
    description: str
    chat: bool = True
    """Asked in turns of a chat, where the tokenizer has a template for them; few-shot and code tasks are not."""

    @abstractmethod
    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0, chat: bool = False) -> Sample:
        """Sample `index`: prompt and answer together take at most `length` tokens, and nearly as many.

        Args:
            chat: context and question are the user's turn, the cue begins the answer, and there is room for the chat
                template and for an answer in a sentence.
        """

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

    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0, chat: bool = False) -> Sample:
        rng = self._rng(length, index, seed)
        facts = self.draw(rng, Words(rng), default_load(length))
        query = facts.queries[0]
        new_tokens = answer_room(tokenizer, query.completion, chat)
        budget = length - new_tokens - taken(tokenizer, query.ask, query.cue, chat)
        context = self._context(tokenizer, rng, facts, budget, index)
        return Sample(
            id=self._id(length, index, seed),
            task=self.name,
            context=context,
            **question_fields(query.ask, query.cue, chat),
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

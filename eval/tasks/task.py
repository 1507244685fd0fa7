"""What a task is, and the shape that all needle tasks share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..data.prompting.chat_template import render, takes_turns
from ..data.sample import Sample
from . import haystack
from .words import Words

Tokenizer = Any  # a Hugging Face tokenizer: PreTrainedTokenizerBase moves between versions, so it is not named here
Metadata = dict[str, float | int | str]

MAX_QUESTION_TOKENS = 48
"""A question has at most this many tokens of the embedded tokenizer."""
SPARE_TOKENS = 3  # room to generate beyond the answer itself: an end mark, a space, a full stop
CHAT_SPARE_TOKENS = 8  # the same in a chat, where a model goes on in a sentence of its own
SEAMS = 4  # tokens that a prompt may have more than its parts have


@dataclass(frozen=True)
class Request:
    """One sample of a task: of these tokens, number `index` at this seed; `chat`: asked in turns."""

    task: Task
    tokenizer: Tokenizer
    length: int
    index: int
    seed: int
    chat: bool

    @property
    def id(self) -> str:
        """The id of the sample."""
        return f"{self.task.name}/{self.length}/{self.seed}/{self.index}"

    def rng(self) -> random.Random:
        """The randomness of this sample."""
        # A string seed is hashed with SHA-512, so it is the same on every machine and Python version.
        return random.Random(self.id)

    def count(self, text: str) -> int:
        """Tokens of `text`, no special ones added."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @property
    def special(self) -> int:
        """Tokens that the tokenizer adds to any text (a BOS, mostly)."""
        return len(self.tokenizer("")["input_ids"])

    @property
    def around(self) -> int:
        """Tokens that the chat template adds to a message of the user and the beginning of an answer."""
        return self.count(render("a", self.tokenizer)) + SEAMS if takes_turns(self.tokenizer) else 0

    def taken(self, ask: str, cue: str) -> int:
        """Tokens of a prompt besides the context, special ones included."""
        if not self.chat:
            return self.special + self.count(ask + cue)
        return self.count(ask) + self.count(cue) + self.around

    def answer_room(self, completion: str) -> int:
        """Tokens that an answer may take."""
        return self.count(completion) + (CHAT_SPARE_TOKENS if self.chat else SPARE_TOKENS)

    def sample(
        self,
        context: str,
        ask: str,
        cue: str,
        answers: tuple[str, ...],
        new_tokens: int,
        metadata: Metadata,
    ) -> Sample:
        """The sample, scored by the task's metric; in plain text the cue is the end of the question."""
        return Sample(
            id=self.id,
            task=self.task.name,
            context=context,
            question=ask if self.chat else ask + cue,
            cue=cue if self.chat else "",
            chat=self.chat,
            answers=answers,
            max_new_tokens=new_tokens,
            metadata=metadata,
            metric=self.task.metric,
        )

    def too_short(self, missing: int) -> ValueError:
        """The error where the length has not so many tokens."""
        return ValueError(f"task {self.task.name!r} does not fit: ask for a length of at least {missing} tokens more")


@dataclass(frozen=True)
class Task(ABC):
    """A kind of question. Tasks hold no state: a sample is a function of (tokenizer, length, index, seed).

    Attributes:
        metric: that scores an answer, see `metrics.score_sample`.
        draw: what a subclass makes a sample of.
        chat: asked in turns of a chat, where the tokenizer has a template for them; few-shot and code tasks are not.
    """

    name: str
    description: str
    metric: str
    draw: Callable[..., Any]
    chat: bool = field(default=True, kw_only=True)

    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0, chat: bool = False) -> Sample:
        """Sample `index`: prompt and answer together take at most `length` tokens, and nearly as many.

        Args:
            chat: context and question are the user's turn, the cue begins the answer, and there is room for the chat
                template and for an answer in a sentence.
        """
        return self.sample(Request(self, tokenizer, length, index, seed, chat))

    @abstractmethod
    def sample(self, request: Request) -> Sample:
        """The sample that is asked for."""


class FreeTask(Task):
    """`draw(request)` is the sample."""

    def sample(self, request: Request) -> Sample:
        sample: Sample = self.draw(request)
        return sample


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
    metadata: Metadata = field(default_factory=dict)

    @property
    def question(self) -> str:
        """Both as plain text."""
        return self.ask + self.cue


@dataclass(frozen=True)
class Facts:
    """Lines to hide in a haystack, in order, and what can be asked about them."""

    needles: tuple[str, ...]
    queries: tuple[Query, ...]


def default_load(length: int) -> int:
    """How many needle lines a task of this many tokens has, roughly: more in longer prompts, up to 24."""
    return max(4, min(24, length // 32))


class NeedleTask(Task):
    """Facts hidden in a haystack. `draw(rng, words, load)` gives `Facts` of about `load` lines; the sample asks the
    first query, training asks all of them."""

    def sample(self, request: Request) -> Sample:
        rng = request.rng()
        facts: Facts = self.draw(rng, Words(rng), default_load(request.length))
        query = facts.queries[0]
        new_tokens = request.answer_room(query.completion)
        budget = request.length - new_tokens - request.taken(query.ask, query.cue)
        context = _context(request, rng, facts, budget)
        # Depth of the earliest needle of the answer, as a share of the context.
        start = min(context.index(facts.needles[needle]) for needle in query.needles)
        where: Metadata = {"depth": round(start / len(context), 4), "needles": len(facts.needles)}
        return request.sample(context, query.ask, query.cue, (query.answer,), new_tokens, query.metadata | where)


def _context(request: Request, rng: random.Random, facts: Facts, budget: int) -> str:
    spare = budget - request.count("\n".join(("", *facts.needles, "")))
    if spare < 0:
        raise request.too_short(-spare)
    # Lines may take a token or two more together than apart: rather leave them room than lose a line below.
    lines = haystack.fill(haystack.stream(rng), request.count, spare - 2)
    depths = sorted(rng.random() for _ in facts.needles)
    if len(depths) == 1:
        # One needle: any ten samples in a row cover every depth.
        depths = [(request.index % 10 + rng.random()) / 10]
    while True:
        context = "".join(haystack.bury(lines, facts.needles, depths)).lstrip("\n") + "\n"
        if request.count(context) <= budget:
            return context
        lines.pop()

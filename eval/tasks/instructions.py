"""Instructions in a system message that a program can check, before a long text that has nothing to do with them.

Eviction hits instructions hardest (arXiv 2510.00231): nothing in the text asks for them, and where several stand
together some are forgotten before others. In the manner of IFEval (2311.07911); no score is comparable with a published
one. Look at the full cache first: SmolLM2-135M-Instruct keeps none of three rules across 500 tokens of text, so
`instructions` says nothing about policies there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from . import haystack
from .sample import Sample
from .task import Task, Tokenizer, chat_tokens, count_tokens, question_fields, taken

#: Tokens of an answer.
_ROOM = 40
_CODES = ("K417", "B902", "T338", "M256", "R771", "D184")
_WORDS = ("lantern", "harbour", "violin", "copper", "meadow", "walnut")
_NAMES = ("Brisco", "Tamsin", "Orlo", "Fenna", "Quill", "Mardo")
_PLACES = ("Lisbon", "Oslo", "Nairobi", "Quebec", "Hanoi", "Tunis")
_QUESTIONS = (
    "What is the capital of France?",
    "What do bees make?",
    "Why is the sea salty?",
    "How do I boil an egg?",
    "What is a good name for a dog?",
    "Tell me about the moon.",
)


@dataclass(frozen=True)
class Rule:
    """One instruction.

    Attributes:
        text: what is asked; `{}` stands for a word that is drawn.
        words: one of these is drawn.
        kept: whether an answer keeps it, given the word.
    """

    text: str
    words: tuple[str, ...]
    kept: Callable[[str, str], bool]


#: By name; each sample has three.
RULES: dict[str, Rule] = {
    "start": Rule("Begin every answer with the code {}.", _CODES, lambda said, word: word in said[: len(word) + 4]),
    "capitals": Rule(
        "Write in capital letters only.", ("",), lambda said, _: said != said.lower() and said == said.upper()
    ),
    "word": Rule("Use the word {} in every answer.", _WORDS, lambda said, word: word in said.lower()),
    "name": Rule(
        "Your name is {}. Say your name in every answer.", _NAMES, lambda said, word: word.lower() in said.lower()
    ),
    "list": Rule("Answer with a list, and begin each line with a star, *.", ("",), lambda said, _: said.count("*") > 1),
}


class Instructions(Task):
    """Three rules at once; the score is the share of them that the answer keeps."""

    name = "instructions"
    description = "Three instructions in the system message, a long text, a question; a program checks the answer."

    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0, chat: bool = False) -> Sample:
        rng = self._rng(length, index, seed)
        drawn = [(name, rng.choice(RULES[name].words)) for name in rng.sample(sorted(RULES), 3)]
        system = " ".join(RULES[name].text.format(word) for name, word in drawn)
        answers = tuple(f"{name}:{word}" for name, word in drawn)
        rules = "+".join(sorted(name for name, _ in drawn))
        return _sample(self, tokenizer, rng, length, index, seed, chat, system, rng.choice(_QUESTIONS), answers, rules)

    def score(self, sample: Sample, prediction: str) -> float:
        pairs = [answer.split(":") for answer in sample.answers]
        return sum(RULES[name].kept(prediction.strip(), word) for name, word in pairs) / len(pairs)


class SystemPrompt(Task):
    """Who the system message says the model is; right if the answer says it."""

    name = "system_prompt"
    description = "The system message says who the model is and where; a long text, then a question about it."

    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0, chat: bool = False) -> Sample:
        rng = self._rng(length, index, seed)
        who, where = rng.choice(_NAMES), rng.choice(_PLACES)
        system = f"You are {who}, an assistant of the library in {where}. You help the visitors of the library."
        ask, answer = rng.choice((("What is your name?", who), ("In which city is your library?", where)))
        return _sample(self, tokenizer, rng, length, index, seed, chat, system, ask, (answer,), ask)

    def score(self, sample: Sample, prediction: str) -> float:
        return float(sample.answers[0].lower() in prediction.lower())


def _sample(
    task: Task,
    tokenizer: Tokenizer,
    rng: random.Random,
    length: int,
    index: int,
    seed: int,
    chat: bool,
    system: str,
    ask: str,
    answers: tuple[str, ...],
    kind: str,
) -> Sample:
    """With as much text between the system message and the question as fits."""
    begin, question = "Here is a text.\n", f"\nThat was the text. {ask}"
    cue = "" if chat else "\nAnswer:"
    marks = chat_tokens(tokenizer) if chat else 0  # of the system's turn, besides those of the user's
    before = marks + count_tokens(tokenizer, f"{system}\n\n{begin}")
    spare = length - _ROOM - taken(tokenizer, question, cue, chat) - before - 8
    if spare < 0:
        raise ValueError(f"task {task.name!r} does not fit: ask for a length of at least {-spare} tokens more")
    lines = haystack.fill(haystack.stream(rng), lambda line: count_tokens(tokenizer, line), spare)
    return Sample(
        id=f"{task.name}/{length}/{seed}/{index}",
        task=task.name,
        context=begin + "".join(lines).lstrip("\n"),
        **question_fields(question, cue, chat),
        answers=answers,
        max_new_tokens=_ROOM,
        metadata={"kind": kind},
        system=system,
    )

"""What a system message says, before a long text that has nothing to do with it; a program checks the answer.

Eviction hits instructions hardest (arXiv 2510.00231): nothing in the text asks for them, and where several stand
together some are forgotten before others. After IFEval (2311.07911), made so that a model of 135M parameters can do it:
the answer is begun for it, and the text is plain sentences, since code makes such a model go on with code. No score is
comparable with a published one. Look at the full cache first.
"""

from __future__ import annotations

import random

from ..data.prompting.chat_template import render, takes_turns
from . import haystack
from .sample import Sample
from .task import Task, Tokenizer, count_tokens, question_fields, special_tokens

#: Tokens of an answer.
_ROOM = 32
_SEAMS = 4  # tokens that a prompt may have more than its parts have
_NAMES = ("Brisco", "Tamsin", "Orlo", "Fenna", "Quill", "Mardo")
_PLACES = ("Lisbon", "Oslo", "Nairobi", "Quebec", "Hanoi", "Tunis")
_CODES = ("K417", "B902", "T338", "M256", "R771", "D184")
#: What an answer has to say, each with the values that are drawn.
_FIELDS: dict[str, tuple[str, ...]] = {
    "name": _NAMES,
    "city": _PLACES,
    "code": _CODES,
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Sunday"),
    "colour": ("violet", "amber", "teal", "crimson", "ivory", "olive"),
}
_QUESTIONS = (
    "What is the capital of France?",
    "What do bees make?",
    "Why is the sea salty?",
    "How do I boil an egg?",
    "What is a good name for a dog?",
    "Tell me about the moon.",
)


class Instructions(Task):
    """Three things that every answer has to begin with; the score is the share of them that it says."""

    name = "instructions"
    description = "The system message says three things that each answer begins with; a long text, then a question."

    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0, chat: bool = False) -> Sample:
        rng = self._rng(length, index, seed)
        said = {name: rng.choice(_FIELDS[name]) for name in rng.sample(sorted(_FIELDS), 3)}
        first, second, third = said
        form = ", ".join(f"{name}: {value}" for name, value in said.items())
        system = (
            f"Begin every answer with your {first}, your {second} and your {third}, in this form:\n"
            f"{form[0].upper()}{form[1:]}."
        )
        ask = f"{rng.choice(_QUESTIONS)} Begin as you were told."
        return _sample(self, tokenizer, rng, (length, index, seed), chat, system, ask, f"{first.title()}:", said)

    def score(self, sample: Sample, prediction: str) -> float:
        return sum(answer.lower() in prediction.lower() for answer in sample.answers) / len(sample.answers)


class SystemPrompt(Task):
    """Who and where the model is and what it knows, as the system message says; right if the answer says it."""

    name = "system_prompt"
    description = "The system message says who the model is and where; a long text, then a question about it."

    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0, chat: bool = False) -> Sample:
        rng = self._rng(length, index, seed)
        who, where, code = rng.choice(_NAMES), rng.choice(_PLACES), rng.choice(_CODES)
        system = f"You are {who}, an assistant of the library in {where}. The code of its door is {code}."
        kind, ask, cue, answer = rng.choice(
            (
                ("name", "What is your name?", "My name is", who),
                ("city", "In which city is your library?", "My library is in", where),
                ("code", "What is the code of the door?", "The code of the door is", code),
            )
        )
        return _sample(self, tokenizer, rng, (length, index, seed), chat, system, ask, cue, {kind: answer})

    def score(self, sample: Sample, prediction: str) -> float:
        return float(sample.answers[0].lower() in prediction.lower())


def _sample(
    task: Task,
    tokenizer: Tokenizer,
    rng: random.Random,
    place: tuple[int, int, int],
    chat: bool,
    system: str,
    ask: str,
    cue: str,
    answers: dict[str, str],
) -> Sample:
    """With as much text between the system message and the question as fits.

    Args:
        place: length, index and seed.
        cue: what the answer begins with.
        answers: what it has to say, by what that is.
    """
    length, index, seed = place
    begin, question, cue = "Here is a text.\n", f"\nThat was the text. {ask}", f"\n{cue}"
    if chat and takes_turns(tokenizer):
        taken = count_tokens(tokenizer, render(begin + question, tokenizer, cue, system))
    else:
        taken = special_tokens(tokenizer) + count_tokens(tokenizer, f"{system}\n\n{begin}{question}{cue}")
    spare = length - _ROOM - taken - _SEAMS
    if spare < 0:
        raise ValueError(f"task {task.name!r} does not fit: ask for a length of at least {-spare} tokens more")
    text = "".join(haystack.fill(haystack.sentences(rng), lambda line: count_tokens(tokenizer, line), spare))
    return Sample(
        id=f"{task.name}/{length}/{seed}/{index}",
        task=task.name,
        context=begin + text.lstrip("\n"),
        **question_fields(question, cue, chat),
        answers=tuple(answers.values()),
        max_new_tokens=_ROOM,
        metadata={"kind": "+".join(sorted(answers))},
        system=system,
    )

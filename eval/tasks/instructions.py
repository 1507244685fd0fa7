"""What a system message says, before a long text that has nothing to do with it; a program checks the answer.

Eviction hits instructions hardest (arXiv 2510.00231): nothing in the text asks for them, and where several stand
together some are forgotten before others. After IFEval (2311.07911), made so that a model of 135M parameters can do it:
the answer is begun for it, and the text is plain sentences, since code makes such a model go on with code. No score is
comparable with a published one. Look at the full cache first.
"""

from __future__ import annotations

import random

from ..data.prompting.chat_template import render, takes_turns
from ..data.sample import Sample
from . import haystack
from .task import SEAMS, FreeTask, Request

#: Tokens of an answer.
_ROOM = 32
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


def _instructions(request: Request) -> Sample:
    """Three things that every answer has to begin with; the score is the share of them that it says."""
    rng = request.rng()
    answers = {name: rng.choice(_FIELDS[name]) for name in rng.sample(sorted(_FIELDS), 3)}
    first, second, third = answers
    form = ", ".join(f"{name}: {value}" for name, value in answers.items())
    system = (
        f"Begin every answer with your {first}, your {second} and your {third}, in this form:\n"
        f"{form[0].upper()}{form[1:]}."
    )
    ask = f"{rng.choice(_QUESTIONS)} Begin as you were told."
    return _sample(request, rng, system, ask, f"{first.title()}:", answers)


def _system_prompt(request: Request) -> Sample:
    """Who and where the model is and what it knows, as the system message says; right if the answer says it."""
    rng = request.rng()
    who, where, code = rng.choice(_NAMES), rng.choice(_PLACES), rng.choice(_CODES)
    system = f"You are {who}, an assistant of the library in {where}. The code of its door is {code}."
    kind, ask, cue, answer = rng.choice(
        (
            ("name", "What is your name?", "My name is", who),
            ("city", "In which city is your library?", "My library is in", where),
            ("code", "What is the code of the door?", "The code of the door is", code),
        )
    )
    return _sample(request, rng, system, ask, cue, {kind: answer})


def _sample(request: Request, rng: random.Random, system: str, ask: str, cue: str, answers: dict[str, str]) -> Sample:
    """With as much text between the system message and the question as fits.

    Args:
        cue: what the answer begins with.
        answers: what it has to say, by what that is.
    """
    begin, question, cue = "Here is a text.\n", f"\nThat was the text. {ask}", f"\n{cue}"
    if request.chat and takes_turns(request.tokenizer):
        taken = request.count(render(begin + question, request.tokenizer, cue, system))
    else:
        taken = request.special + request.count(f"{system}\n\n{begin}{question}{cue}")
    spare = request.length - _ROOM - taken - SEAMS
    if spare < 0:
        raise request.too_short(-spare)
    text = "".join(haystack.fill(haystack.sentences(rng), request.count, spare))
    kinds = {"kind": "+".join(sorted(answers))}
    return request.sample(
        begin + text.lstrip("\n"), question, cue, tuple(answers.values()), _ROOM, {**kinds}, system=system
    )


SYSTEM_TASKS = (
    FreeTask(
        "instructions",
        "The system message says three things that each answer begins with; a long text, then a question.",
        "string_match_all",
        _instructions,
    ),
    FreeTask(
        "system_prompt",
        "The system message says who the model is and where; a long text, then a question about it.",
        "string_match_all",
        _system_prompt,
    ),
)

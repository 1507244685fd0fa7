"""Write the next line of real code (as in LCC and RepoBench-P of LongBench, arXiv 2308.14508)."""

from __future__ import annotations

import random

from ..data import library
from ..data.sample import Sample
from .task import MAX_QUESTION_TOKENS, FreeTask, Request

_ANSWER_TOKENS = 48
_TRIES = 200


def _sample(request: Request) -> Sample:
    rng, length = request.rng(), request.length
    room = length - request.around if request.chat else length  # in a chat the last line begins the answer
    for _ in range(_TRIES):
        module, lines, here = _place(rng)
        question, answer = lines[here], lines[here + 1]
        budget = room - request.special - request.count(question + answer) - 1
        context = _before(request, lines, here, budget)
        if _fits(request, context, question, answer, room):
            new_tokens = request.count(answer) + 1
            return request.sample(
                context, "", question, (answer.strip(),), new_tokens, {"module": module, "line": here + 1}
            )
    raise ValueError(f"no place in the held-out modules for a next_line sample of {length} tokens")


def _place(rng: random.Random) -> tuple[str, list[str], int]:
    """A held-out module and a line in it that is not the last."""
    module = rng.choice(library.HELD_OUT)
    lines = library.split_lines(library.source(module))
    return module, lines, rng.randrange(1, len(lines) - 1)


def _before(request: Request, lines: list[str], here: int, budget: int) -> str:
    """As many whole lines before `here` as fit, the first one cut at a word so that the length is met."""
    start, left = here, budget
    while start > 0 and left > 0:
        start -= 1
        left -= request.count(lines[start])
    text = "".join(lines[start:here]).lstrip("\n")
    while request.count(text) > budget:
        head, _, tail = text.partition(" ")
        text = tail if head and tail else text[1:]
    return text


def _fits(request: Request, context: str, question: str, answer: str, length: int) -> bool:
    """Long enough, a short question, an answer worth asking for, and no token across the border."""
    parts = [
        request.tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (context, question, answer, context + question)
    ]
    whole = parts.pop()
    total = sum(map(len, parts)) + request.special + 1
    return (
        len(parts[1]) <= MAX_QUESTION_TOKENS
        and len(answer.strip()) >= 4
        and len(parts[2]) <= _ANSWER_TOKENS
        and 0.95 * length <= total <= length
        and whole == parts[0] + parts[1]
    )


NEXT_LINE = FreeTask(
    "next_line",
    "Write the next line of a standard library module the embedded model was not trained on.",
    "line_similarity",
    _sample,
    chat=False,
)

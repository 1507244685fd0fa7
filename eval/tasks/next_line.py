"""Write the next line of real code (as in LCC and RepoBench-P of LongBench, arXiv 2308.14508)."""

from __future__ import annotations

import difflib
import random

from . import library
from .sample import MAX_QUESTION_TOKENS, Sample
from .task import Task, Tokenizer, chat_tokens, count_tokens, first_line, question_fields, special_tokens

_ANSWER_TOKENS = 48
_TRIES = 200


class NextLine(Task):
    name = "next_line"
    chat = False
    description = "Write the next line of a standard library module the embedded model was not trained on."

    def make(self, tokenizer: Tokenizer, length: int, index: int, seed: int = 0, chat: bool = False) -> Sample:
        rng, room = self._rng(length, index, seed), length
        if chat:  # the last line begins the answer
            room = length - chat_tokens(tokenizer)
        for _ in range(_TRIES):
            module, lines, here = _place(rng)
            question, answer = lines[here], lines[here + 1]
            budget = room - special_tokens(tokenizer) - count_tokens(tokenizer, question + answer) - 1
            context = _before(tokenizer, lines, here, budget)
            if _fits(tokenizer, context, question, answer, room):
                return Sample(
                    id=self._id(length, index, seed),
                    task=self.name,
                    context=context,
                    **question_fields("", question, chat),
                    answers=(answer.strip(),),
                    max_new_tokens=count_tokens(tokenizer, answer) + 1,
                    metadata={"module": module, "line": here + 1},
                )
        raise ValueError(f"no place in the held-out modules for a next_line sample of {length} tokens")

    def score(self, sample: Sample, prediction: str) -> float:
        """Edit similarity of the first line, as LongBench scores code."""
        return difflib.SequenceMatcher(None, sample.answers[0], first_line(prediction)).ratio()


def _place(rng: random.Random) -> tuple[str, list[str], int]:
    """A held-out module and a line in it that is not the last."""
    module = rng.choice(library.HELD_OUT)
    lines = library.split_lines(library.source(module))
    return module, lines, rng.randrange(1, len(lines) - 1)


def _before(tokenizer: Tokenizer, lines: list[str], here: int, budget: int) -> str:
    """As many whole lines before `here` as fit, the first one cut at a word so that the length is met."""
    start, left = here, budget
    while start > 0 and left > 0:
        start -= 1
        left -= count_tokens(tokenizer, lines[start])
    text = "".join(lines[start:here]).lstrip("\n")
    while count_tokens(tokenizer, text) > budget:
        head, _, tail = text.partition(" ")
        text = tail if head and tail else text[1:]
    return text


def _fits(tokenizer: Tokenizer, context: str, question: str, answer: str, length: int) -> bool:
    """Long enough, a short question, an answer worth asking for, and no token across the border."""
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (context, question, answer)]
    whole = tokenizer(context + question, add_special_tokens=False)["input_ids"]
    total = sum(map(len, parts)) + special_tokens(tokenizer) + 1
    return (
        len(parts[1]) <= MAX_QUESTION_TOKENS
        and len(answer.strip()) >= 4
        and len(parts[2]) <= _ANSWER_TOKENS
        and 0.95 * length <= total <= length
        and whole == parts[0] + parts[1]
    )

"""Line retrieval of LongEval (Li et al. 2023, github.com/DachengLi1/LongChat).

As there: the prompt, the form of a line, numbers from 1 to 50000, one key per line, 100 tokens to answer, and the last
whole number of the answer counts. Different: keys are made of this package's own adjectives and nouns instead of
wonderwords, and there are as many lines as fit the length instead of 200 to 680. Scores are comparable with published
ones at most by order of magnitude.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from .sized import Draft, Prefix, SizedTask
from .words import ADJECTIVES, random_key

_GREATEST = 50_000

BEFORE = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> "
    "of a certain line index. Now the record start:\n\n"
)
"""What stands before the lines; the grammar is the protocol's."""


def _draw(rng: random.Random, length: int, index: int) -> Draft:
    key, value, depth = random_key(rng), rng.randint(1, _GREATEST), rng.random()
    fact = _line(key, value)
    others = Prefix(_others(rng, key, value))

    def context(lines: int) -> str:
        rest, place = others(lines - 1), int(depth * lines)
        # Most tokenizers have a token for the two newlines: both belong to the context.
        return BEFORE + "".join([*rest[:place], fact, *rest[place:]]) + "\n"

    return Draft(
        context=context,
        ask=f"Now the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number. ",
        answers=(str(value),),
        completion=f" The <REGISTER_CONTENT> in line {key} is <{value}>.",
        facts=(fact,),
    )


def _line(key: str, value: int) -> str:
    return f"line {key}: REGISTER_CONTENT is <{value}>\n"


def _others(rng: random.Random, key: str, value: int) -> Iterator[str]:
    """Endless lines with other keys, all different, and other numbers."""
    seen = {key}
    while True:
        other, number = random_key(rng), rng.randint(1, _GREATEST)
        while other in seen:
            other = f"{rng.choice(ADJECTIVES)}-{other}"
        if number != value:
            seen.add(other)
            yield _line(other, number)


LONGEVAL = SizedTask(
    "longeval",
    "LongEval: the number in one of many lines; the last number of the answer counts.",
    "longeval",
    _draw,
    answer_tokens=100,
    unit="lines",
)

"""RULER's common word extraction: the ten words that a long numbered list repeats most.

As in RULER: the list, ten words 30 times among words 3 times each, after a solved list of forty words 10 and 3 times;
below 4096 tokens 6 and 1 times after a list of twenty words 3 times and once. Different: the wording of the
instruction, and the words, which come from the source text of Python's standard library instead of wonderwords; lists
longer than its vocabulary (about 80,000 tokens) go on with compounds such as `harborlantern`. Scores are not
comparable with published ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache

from ...data import library
from ..sized import Draft, Prefix, SizedTask
from ..words import POOL

_COMMON = 10
_LONG = 4096


def _draw(rng: random.Random, length: int, index: int) -> Draft:
    words = list(vocabulary())
    rng.shuffle(words)
    solved, common, rest = words[:40], words[40 : 40 + _COMMON], words[40 + _COMMON :]
    if length >= _LONG:
        example, often, seldom = _listed(rng.random(), solved[:_COMMON], 10, solved[_COMMON:], 3), 30, 3
    else:
        example, often, seldom = _listed(rng.random(), solved[:_COMMON], 3, solved[_COMMON:20], 1), 6, 1
    before = f"{example}{_ASK}{_CUE} {_numbered(solved[:_COMMON])}\n"
    order = rng.random()
    others = Prefix(_endless(rng, rest))
    return Draft(
        context=lambda units: before + _listed(order, common, often, others(units), seldom),
        ask=_ASK,
        cue=_CUE,
        answers=tuple(common),
        completion=" " + _numbered(common),
    )


_ASK = f"Question: Which {_COMMON} words come up most often in the list above?"
_CUE = f" Answer: The {_COMMON} words that come up most often in the list above are:"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _listed(order: float, common: list[str], often: int, others: list[str], seldom: int) -> str:
    """Instruction and list, in an order drawn from a number."""
    words = common * often + others * seldom
    random.Random(order).shuffle(words)
    return f"The following is a numbered list of words, some of them more often than others.\n{_numbered(words)}\n"


def _endless(rng: random.Random, words: list[str]) -> Iterator[str]:
    yield from words
    seen = set(words)
    while True:
        compound = rng.choice(POOL) + rng.choice(POOL)
        if compound not in seen:
            seen.add(compound)
            yield compound


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Words of 4 to 12 letters in the standard library modules that fill haystacks, each once, sorted."""
    word = re.compile(r"(?<![\w.'])[a-z]{4,12}(?![\w'(=])")
    return tuple(sorted({match for module in library.FILLER for match in word.findall(library.source(module))}))


COMMON_WORDS = SizedTask(
    "ruler_cwe",
    "RULER: the ten words that come up most often in a numbered list.",
    "string_match_all",
    _draw,
    answer_tokens=120,
    unit="words",
)

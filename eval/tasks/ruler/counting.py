"""RULER's two tasks of counting. Scores are not comparable with published ones.

Common word extraction, as in RULER: a numbered list, ten words 30 times among words 3 times each, after a solved list
of forty words 10 and 3 times; below 4096 tokens 6 and 1 times after a list of twenty words 3 times and once. Different:
the wording of the instruction, and the words, which come from the source text of Python's standard library instead of
wonderwords; lists longer than its vocabulary (about 80,000 tokens) go on with compounds such as `harborlantern`.

Frequent word extraction, as in RULER: words of six random letters, up to 2000 of them, as often as a zeta distribution
with exponent 2 says, and dots in place of the most frequent one. Different: the wording of the instruction.
"""

from __future__ import annotations

import math
import random
import re
import string
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


_LETTERS, _VOCABULARY = 6, 2000
_DOTS = "..."
_SMALLEST = 73  # from here on the fourth rank comes up more often than the fifth


def _draw_coded(rng: random.Random, length: int, index: int) -> Draft:
    words: dict[str, None] = {}
    while len(words) < _VOCABULARY:
        words["".join(rng.choices(string.ascii_lowercase, k=_LETTERS))] = None
    ranked = [_DOTS, *list(words)[1:]]
    order = rng.random()
    return Draft(
        context=lambda units: f"{_CODED}{_text(order, ranked, units)}\n",
        ask=_ASK_CODED,
        cue=_CUE_CODED,
        answers=tuple(ranked[1:4]),
        completion=" " + ", ".join(ranked[1:4]),
        smallest=_SMALLEST,
    )


_CODED = "The following text is written in code. Count how often each coded word comes up; dots are not a word.\n"
_ASK_CODED = "Question: Which three coded words come up most often in the text above? Answer with the words alone."
_CUE_CODED = " Answer: The three coded words that come up most often are:"


def _text(order: float, ranked: list[str], size: int) -> str:
    """About `size` words by rank, in an order drawn from a number."""
    share = size * 6 / math.pi**2  # the sum of all 1 / rank ** 2 is pi ** 2 / 6
    words = [word for rank, word in enumerate(ranked, 1) for _ in range(int(share / rank**2))]
    random.Random(order).shuffle(words)
    return " ".join(words)


CODED_WORDS = SizedTask(
    "ruler_fwe", "RULER: the three most frequent words of a text in code.", "string_match_all", _draw_coded, 50, "words"
)

"""RULER's frequent word extraction: the three most frequent of many made-up words.

As in RULER: words of six random letters, up to 2000 of them, as often as a zeta distribution with exponent 2 says, and
dots in place of the most frequent one. Different: the wording of the instruction. Scores are not comparable with
published ones.
"""

from __future__ import annotations

import math
import random
import string

from ..sized import Draft, SizedTask

_LETTERS, _VOCABULARY = 6, 2000
_DOTS = "..."
_SMALLEST = 73  # from here on the fourth rank comes up more often than the fifth


def _draw(rng: random.Random, length: int, index: int) -> Draft:
    words: dict[str, None] = {}
    while len(words) < _VOCABULARY:
        words["".join(rng.choices(string.ascii_lowercase, k=_LETTERS))] = None
    ranked = [_DOTS, *list(words)[1:]]
    order = rng.random()
    return Draft(
        context=lambda units: f"{_BEFORE}{_text(order, ranked, units)}\n",
        ask=_ASK,
        cue=_CUE,
        answers=tuple(ranked[1:4]),
        completion=" " + ", ".join(ranked[1:4]),
        smallest=_SMALLEST,
    )


_BEFORE = "The following text is written in code. Count how often each coded word comes up; dots are not a word.\n"
_ASK = "Question: Which three coded words come up most often in the text above? Answer with the words alone."
_CUE = " Answer: The three coded words that come up most often are:"


def _text(order: float, ranked: list[str], size: int) -> str:
    """About `size` words by rank, in an order drawn from a number."""
    share = size * 6 / math.pi**2  # the sum of all 1 / rank ** 2 is pi ** 2 / 6
    words = [word for rank, word in enumerate(ranked, 1) for _ in range(int(share / rank**2))]
    random.Random(order).shuffle(words)
    return " ".join(words)


CODED_WORDS = SizedTask(
    "ruler_fwe", "RULER: the three most frequent words of a text in code.", "string_match_all", _draw, 50, "words"
)

"""RULER's variable tracking: five variables get the same value, one from the other, in noise.

As in RULER: one chain of four hops, names of five capital letters, the form of an assignment, their order in the text,
the noise, a solved example of names of three letters before the question. Different: the wording of the instruction,
the size of the example (two lines of noise below 4096 tokens, ten from there on), and the last line of noise, which
may be shorter. Scores are not comparable with published ones.
"""

from __future__ import annotations

import random
import string

from .. import haystack
from ..sized import Draft, SizedTask
from .needles import grass_lines

_HOPS = 4
_LONG = 4096


def _draw(rng: random.Random, length: int, index: int) -> Draft:
    example = _Chain(rng, letters=3)
    shown = 50 if length >= _LONG else 10  # sentences, five to a line
    before = f"{example.text(shown)}{example.ask}{example.cue} {' '.join(example.names)}\n\n"
    chain = _Chain(rng, letters=5)
    return Draft(
        context=lambda units: before + chain.text(units),
        ask=chain.ask,
        cue=chain.cue,
        answers=tuple(chain.names),
        completion=" " + " ".join(chain.names),
        facts=(chain.lines[0],),
        metadata={"hops": _HOPS},
    )


class _Chain:
    """Assignments, and the question about them."""

    def __init__(self, rng: random.Random, letters: int) -> None:
        names: dict[str, None] = {}
        while len(names) <= _HOPS:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        self.names = list(names)
        value = rng.randint(10_000, 99_999)
        hops = zip(self.names[1:], self.names, strict=False)
        self.lines = [f"VAR {self.names[0]} = {value}", *(f"VAR {name} = VAR {source} " for name, source in hops)]
        self.ask = f"Question: Which variables have the value {value}, directly or from another variable?"
        self.cue = f" Answer: {len(names)} variables in the text above have the value {value}, and their names are:"
        self._depths = sorted(rng.random() for _ in self.lines)

    def text(self, sentences: int) -> str:
        """Instruction and noise, the assignments in it in their order."""
        noise = [line + "\n" for line in grass_lines(sentences)]
        text = haystack.woven(noise, self.lines, self._depths, " ")
        return f"Keep track of the variables that are given values in the following text.\n\n{text}"


VARIABLES = SizedTask(
    "ruler_vt",
    "RULER: name the five variables that have a value, over a chain of four assignments.",
    "string_match_all",
    _draw,
    answer_tokens=30,
    unit="sentences",
)

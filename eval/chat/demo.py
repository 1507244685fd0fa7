"""A conversation whose first message tells facts that later ones ask for, with filler in between."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..tasks import haystack
from ..tasks.suite import KvRecall, Passkey
from ..tasks.task import count_tokens
from ..tasks.words import Words

#: Tokens of filler in every message: six of them stay within what the embedded model was trained on.
FILLER = 300


@dataclass(frozen=True)
class DemoTurn:
    """A message, and the word that a right answer has in it.

    Attributes:
        shown: the message with the filler counted instead of written out.
    """

    message: str
    answer: str
    shown: str

    def is_right(self, said: str) -> bool:
        """Whether the answer stands on the first line."""
        return self.answer in said.strip().split("\n", 1)[0]


def demo_turns(tokenizer: Any, seed: int) -> Iterator[DemoTurn]:
    """Five facts in the first message, then a question at the end of every message."""
    rng = random.Random(f"demo/{seed}")
    words = Words(rng)
    codes, key = (task.draw(rng, words, 4) for task in (KvRecall(), Passkey()))
    needles = [*codes.needles, *key.needles]
    rng.shuffle(needles)
    first, *others = codes.queries
    stream = haystack.stream(rng)
    for query in (first, key.queries[0], *others, key.queries[0]):
        filler = haystack.fill(stream, lambda text: count_tokens(tokenizer, text), FILLER)
        depths = sorted(rng.random() for _ in needles)
        lines_with_facts = [*haystack.bury(filler, needles, depths), f"\n{query.question}"]
        said = {*needles, query.question}
        yield DemoTurn("".join(lines_with_facts).lstrip("\n"), query.answer, _without_filler(lines_with_facts, said))
        needles = []


def _without_filler(lines: Sequence[str], said: Set[str]) -> str:
    shown: list[str] = []
    for is_said, grouped in groupby((line.lstrip("\n") for line in lines), said.__contains__):
        run = list(grouped)
        shown += run if is_said else [f"... {len(run)} {'line' if len(run) == 1 else 'lines'} of filler ..."]
    return "\n".join(shown)

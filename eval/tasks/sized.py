"""Tasks whose haystack is cut to the length in a few looks at the tokenizer, however long it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Generic, TypeVar

from ..data.sample import Sample
from .task import Metadata, Request, Task

Item = TypeVar("Item")

_PROBE = 16  # units above the smallest size, to learn what a unit costs
_GROWTH = 16  # the next size is at most so many times the last
_LINES = 8  # sizes read off a line
_CLOSE = 1 / 1000  # of the budget left over is close enough


class Prefix(Generic[Item]):
    """The beginning of an endless supply, drawn only as far as it is asked for and the same each time."""

    def __init__(self, supply: Iterator[Item]) -> None:
        self._supply = supply
        self._drawn: list[Item] = []

    def __call__(self, count: int) -> list[Item]:
        """The first `count` items."""
        self._drawn += islice(self._supply, max(0, count - len(self._drawn)))
        return self._drawn[:count]


@dataclass(frozen=True)
class Draft:
    """A sample that has no size yet.

    Attributes:
        context: from a number of units of hay to the text before the question; the more units, the more tokens.
        ask: the question after it.
        cue: what the answer begins with, as it follows the question in plain text.
        answers: what the metric compares with.
        completion: an answer as a model would write it, to leave room for.
        smallest: units below which there is no sample.
        facts: parts of the context that hold the answer; the first of them decides the depth.
        metadata: what else to remember.
    """

    context: Callable[[int], str]
    ask: str
    answers: tuple[str, ...]
    completion: str
    cue: str = ""
    smallest: int = 1
    facts: tuple[str, ...] = ()
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class SizedTask(Task):
    """`draw(rng, length, index)` gives a `Draft`: a sample at any size. The size that fills the length is found here.

    Attributes:
        answer_tokens: tokens of an answer in the protocol. Prompts of less than four times as many tokens give a
            quarter of their length, tokenizers that need more for a right answer get more.
        unit: what the size counts, a key of the metadata.
    """

    answer_tokens: int
    unit: str

    def sample(self, request: Request) -> Sample:
        length = request.length
        draft: Draft = self.draw(request.rng(), length, request.index)
        new_tokens = max(request.answer_room(draft.completion), min(self.answer_tokens, length // 4))
        try:
            context, units = _fit(request, draft, length - new_tokens)
        except TooSmallError as error:
            # Samples differ, and so does one sample at another length: a tenth more, in round numbers.
            enough = length + error.missing + max(0, self.answer_tokens - new_tokens)
            enough = math.ceil(enough * 1.1 / 64) * 64
            raise ValueError(
                f"task {self.name!r} does not fit a length of {length} tokens: the shortest prompt and its answer take "
                f"{error.missing} more, so ask for {enough} or more"
            ) from None
        metadata: Metadata = {self.unit: units}
        if draft.facts:
            metadata["depth"] = round(min(map(context.index, draft.facts)) / len(context), 4)
        return request.sample(context, draft.ask, draft.cue, draft.answers, new_tokens, metadata | draft.metadata)


def _fit(request: Request, draft: Draft, budget: int) -> tuple[str, int]:
    """The greatest context that leaves the prompt within `budget` tokens, and its units."""
    question = draft.ask if request.chat else draft.ask + draft.cue
    around = request.taken(draft.ask, draft.cue)
    left, alone = budget - around, request.count(question)
    while True:
        units = largest(lambda size: request.count(draft.context(size)), left, draft.smallest)
        context = draft.context(units)
        # Context and question may be encoded apart or together: the length holds for both.
        over = request.count(context + question) - alone + around - budget
        if over <= 0:
            return context, units
        left -= over


class TooSmallError(Exception):
    """Even the smallest size costs more than there is."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} short")
        self.missing = missing


def largest(cost: Callable[[int], int], budget: int, smallest: int) -> int:
    """The greatest size, within a unit or a thousandth of the budget, whose cost is at most `budget`.

    Costs are all but proportional, so the next size to try is read off a line through the last two.

    Raises:
        TooSmallError: `smallest` costs more than `budget`.
    """
    low, paid = smallest, cost(smallest)
    if paid > budget:
        raise TooSmallError(paid - budget)
    high: int | None = None
    size = low + _PROBE
    for look in count():
        price = cost(size)
        rate = max(price - paid, 1) / (size - low)
        if price <= budget:
            low, paid = size, price
        else:
            high = size
        if budget - paid < max(rate, budget * _CLOSE) or high == low + 1:
            break
        size = low + max(1, int((budget - paid) / rate))
        if high is None:
            size = min(size, low * _GROWTH)  # small texts are cheap to look at, and tell the price of large ones
        elif look < _LINES:
            size = min(size, high - 1)
        else:
            size = (low + high) // 2  # the line keeps missing
    return low

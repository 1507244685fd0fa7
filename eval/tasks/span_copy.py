"""Copy a marked span word for word."""

from __future__ import annotations

import random
import re

from .sample import Sample
from .task import Facts, NeedleTask, Query, first_line
from .words import Words

_WORDS = 12


class SpanCopy(NeedleTask):
    name = "span_copy"
    description = "Copy twelve random words that stand behind a marker; the score is the share of words in place."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        count, length = max(1, min(3, load // 8)), max(3, min(_WORDS, load))
        length = _WORDS if load >= 8 else length
        markers = words.take(count)
        spans = [" ".join(words.take(length)) for _ in markers]
        needles = tuple(f"Span {marker}: {span}." for marker, span in zip(markers, spans, strict=True))
        queries = [
            Query(f"Copy the span named {marker}. Span {marker}:", f" {span}.", span, (index,), {"words": length})
            for index, (marker, span) in enumerate(zip(markers, spans, strict=True))
        ]
        rng.shuffle(queries)
        return Facts(needles, tuple(queries))

    def score(self, sample: Sample, prediction: str) -> float:
        wanted = sample.answers[0].split()
        said: list[str] = re.findall(r"\w+", first_line(prediction))
        return sum(a == b for a, b in zip(wanted, said)) / len(wanted)  # noqa: B905 - a short copy loses words

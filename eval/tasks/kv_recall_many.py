"""One of many facts of the same kind, with a value of two words (multi-key retrieval, RULER, arXiv 2404.06654)."""

from __future__ import annotations

import random
import re

from .sample import Sample
from .task import Facts, NeedleTask, Query
from .words import Words


class KvRecallMany(NeedleTask):
    name = "kv_recall_many"
    description = "Recall the two-word value of one register out of many; the score is the share of words right."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        keys, left, right = words.take(load), words.take(load), words.take(load)
        values = [f"{a} {b}" for a, b in zip(left, right, strict=True)]
        needles = tuple(f"Register {key} = {value}" for key, value in zip(keys, values, strict=True))
        queries = [self._query(key, value, index) for index, (key, value) in enumerate(zip(keys, values, strict=True))]
        rng.shuffle(queries)
        return Facts(needles, tuple(queries))

    def _query(self, key: str, value: str, index: int) -> Query:
        return Query(f"What is in register {key}? Register {key} =", f" {value}", value, (index,))

    def score(self, sample: Sample, prediction: str) -> float:
        wanted = sample.answers[0].split()
        said: list[str] = re.findall(r"\w+", prediction)
        return sum(a == b for a, b in zip(wanted, said)) / len(wanted)  # noqa: B905 - a short answer loses words

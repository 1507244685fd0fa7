"""One fact among a few of its kind (as in needle-in-a-haystack with distractors, RULER, arXiv 2404.06654)."""

from __future__ import annotations

import random
import re

from .sample import Sample
from .task import Facts, NeedleTask, Query
from .words import Words

_PAIRS = 4


class KvRecall(NeedleTask):
    name = "kv_recall"
    description = "Recall the code word of one name; three other names have codes too."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        count = min(_PAIRS, load)
        keys, values = words.take(count), words.take(count)
        needles = tuple(f"The code of {key} is {value}." for key, value in zip(keys, values, strict=True))
        queries = [self._query(key, value, index) for index, (key, value) in enumerate(zip(keys, values, strict=True))]
        rng.shuffle(queries)
        return Facts(needles, tuple(queries))

    def _query(self, key: str, value: str, index: int) -> Query:
        question = f"What is the code of {key}? The code of {key} is"
        return Query(question, f" {value}", value, (index,))

    def score(self, sample: Sample, prediction: str) -> float:
        found = re.search(r"\w+", prediction)
        return float(found is not None and found.group() == sample.answers[0])

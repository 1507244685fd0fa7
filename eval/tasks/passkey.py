"""Passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300)."""

from __future__ import annotations

import random
import re

from .sample import Sample
from .task import Facts, NeedleTask, Query
from .words import Words


class Passkey(NeedleTask):
    name = "passkey"
    description = "Find a five-digit key hidden once, at any depth, in filler text."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        # No digit twice: the task is about finding the key, not about counting repetitions.
        key = "".join(rng.sample("0123456789", 5))
        question = "Which passkey opens the vault? The vault opens with passkey"
        return Facts((f"The vault opens with passkey {key}.",), (Query(question, f" {key}", key, (0,)),))

    def score(self, sample: Sample, prediction: str) -> float:
        found = re.search(r"\d+", prediction)
        return float(found is not None and found.group() == sample.answers[0])

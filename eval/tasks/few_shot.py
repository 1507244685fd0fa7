"""In-context classification with arbitrary labels (label remapping as in Wei et al. 2023, arXiv 2303.03846)."""

from __future__ import annotations

import random
import re

from .sample import Sample
from .task import Facts, NeedleTask, Query
from .words import CLASSES, Words

_CLASSES = 4


class FewShot(NeedleTask):
    name = "few_shot"
    description = "Label a new word by its class, when each class was given an arbitrary label in scattered examples."

    def draw(self, rng: random.Random, words: Words, load: int) -> Facts:
        classes = rng.sample(sorted(CLASSES), max(2, min(_CLASSES, load // 2)))
        shots = max(1, min(6, load // len(classes)))
        labels = dict(zip(classes, words.take(len(classes)), strict=True))
        members = {name: rng.sample(CLASSES[name], shots + 2) for name in classes}
        shown = [(word, name) for name in classes for word in members[name][:shots]]
        asked = [(word, name) for name in classes for word in members[name][shots:]]
        rng.shuffle(shown)
        rng.shuffle(asked)
        needles = tuple(f"Example: {word} -> {labels[name]}" for word, name in shown)
        homes = {name: tuple(i for i, (_, owner) in enumerate(shown) if owner == name) for name in classes}
        return Facts(needles, tuple(_query(word, labels[name], homes[name], len(classes)) for word, name in asked))

    def score(self, sample: Sample, prediction: str) -> float:
        found = re.search(r"\w+", prediction)
        return float(found is not None and found.group() == sample.answers[0])


def _query(word: str, label: str, home: tuple[int, ...], classes: int) -> Query:
    return Query(f"Example: {word} ->", f" {label}", label, home, {"classes": classes, "shots": len(home)})

"""What the embedded model is taught, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged_eviction_eval.tasks.task import default_load

from .corpus import Corpus, Sequence

_TEXT_SHARE = 0.2  # of the sequences; real text also makes half of the filler of all others


@dataclass(frozen=True)
class Lesson:
    """A stretch of training: prompt lengths drawn from `lengths`, at most `load` needle lines."""

    lengths: tuple[int, ...]
    load: int
    steps: int
    early: bool = True  # ends as soon as every task is good
    echo: float = 0.0  # share of sequences that only repeat themselves
    tokens: int = 4096  # in a batch
    rate: float = 1.0  # of the learning rate, at the start; it falls to nothing unless the lesson may end early
    first: float = 1.0  # weight of an answer's first token: it alone says which of several needles is meant

    def batch(self, corpus: Corpus) -> list[Sequence]:
        """Sequences of about one length."""
        length = int(corpus.rng.choice(self.lengths) * corpus.rng.uniform(0.75, 1.0))
        most = min(self.load, default_load(length)) if length >= 256 else self.load
        return [self._sequence(corpus, length, most) for _ in range(max(1, self.tokens // length))]

    def _sequence(self, corpus: Corpus, length: int, most: int) -> Sequence:
        kind = corpus.rng.random()
        if kind < self.echo:
            return corpus.echo(length)
        if kind < self.echo + _TEXT_SHARE:
            return corpus.text(length)
        return corpus.questions(length, corpus.rng.randint(max(2, most // 2), most))


# From two facts in twenty tokens to two dozen in two thousand. Begun at many facts, recall is not learned at all.
LESSONS = (
    Lesson((20,), 2, 800, echo=1.0, tokens=1536),
    Lesson((48,), 2, 700, echo=0.6, tokens=1536),
    Lesson((80, 112), 4, 800, echo=0.25, tokens=2048),
    Lesson((128, 192), 8, 800, echo=0.1, tokens=2048),
    Lesson((192, 256, 384), 12, 700, echo=0.05, tokens=3072),
    Lesson((256, 512, 768), 24, 500),
    Lesson((256, 512, 1024, 1024, 2304), 24, 1200, early=False),
    Lesson((512, 1024, 2304, 2304), 24, 1000, early=False, rate=0.5),
)

# Afterwards, from what is stored and with a fresh optimiser: telling needles apart.
FINISH = Lesson((256, 512, 1024, 2304), 24, 1000, early=False, rate=0.5, first=4.0)

"""The progress bar of `prepare`, what it says if much is left, and the expected work.

The unit of work is the time that one cache takes on one passage of text of 880 tokens; the numbers are measured on
SmolLM2.
"""

import sys
import time
from collections.abc import Mapping

from tqdm.auto import tqdm

from .passages import Passage

#: Seconds between two lines where there is no terminal to draw a bar on.
LINE_SECONDS = 15.0
#: Minutes after which a cheaper setting is named.
LONG = 10
#: Part of the work after which the rest can be estimated.
_KNOWN = 0.02
_WINDOW = 7.0
_PASSAGE, _QUESTION = 6.0, 0.6
_READING, _ASKED = 1.0, 0.5
_FEW_BITS = 1.5


def of_window(share: float) -> float:
    """The work of fitting scores to a part of a window."""
    return _WINDOW * share


def of_passage(passage: Passage) -> float:
    """The work of reading a passage with the full cache."""
    return _PASSAGE + _QUESTION * len(passage.questions)


def of_reading(passage: Passage, few_bits: bool = False) -> float:
    """The work of one cache on one passage."""
    work = _READING * (passage.continuation is not None) + _ASKED * len(passage.questions)
    return work * (_FEW_BITS if few_bits else 1.0)


class Progress:
    """A progress bar, from the first second on; lines where standard error is no terminal, as in a log.

    Args:
        shown: whether anything is.
    """

    def __init__(self, shown: bool) -> None:
        in_notebook = any(kind.__module__ == "tqdm.notebook" for kind in tqdm.__mro__)
        drawn = shown and (in_notebook or sys.stderr.isatty())
        self._shown, self._in_lines, self._said = shown, shown and not drawn, 0.0
        self._bar = tqdm(total=1, desc="looking for a profile", disable=not drawn, leave=False)
        self._cheaper: Mapping[str, float] = {}
        self._begun, self._work, self._total = time.monotonic(), 0.0, 1.0

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def begin(self, total: float, cheaper: Mapping[str, float]) -> None:
        """Begin to measure.

        Args:
            total: expected work.
            cheaper: the work of cheaper settings, by what the user would write.
        """
        self._begun, self._work, self._total, self._cheaper = time.monotonic(), 0.0, total, cheaper
        self._bar.set_description("measuring this model")
        self._bar.bar_format = "{desc}{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
        self._bar.reset(total)
        self._said = self._begun
        self._say("measuring this model")

    def advance(self, work: float) -> None:
        """So much was done."""
        self._work += work
        if not self._bar.disable:
            self._bar.update(min(work, self._bar.total - self._bar.n))  # the work is an estimate
        now = time.monotonic()
        if now - self._said >= LINE_SECONDS:
            self._said, seconds = now, now - self._begun
            share = min(self._work / self._total, 1.0)  # the work is an estimate
            left = f", about {seconds * (1 / share - 1) / 60:.0f} min left" if share >= _KNOWN else ""
            self._say(f"{share:.0%} measured, {seconds:.0f} s{left}")
        if self._cheaper and self._work >= _KNOWN * self._total:
            self._suggest((now - self._begun) / self._work)

    def skip(self, work: float) -> None:
        """So much needs not be done."""
        self._total -= work
        if not self._bar.disable:
            self._bar.total = self._total
            self._bar.refresh()

    def _say(self, text: str) -> None:
        if self._in_lines:
            print(f"prepare: {text}", file=sys.stderr, flush=True)

    def _suggest(self, seconds: float) -> None:
        """Name cheaper settings, once, if more than `LONG` minutes are left.

        Args:
            seconds: time that one unit of work takes.
        """
        left = (self._total - self._work) * seconds / 60
        if left > LONG and self._shown:
            others = ", ".join(f"{words} {max(work * seconds / 60, 1):.0f}" for words, work in self._cheaper.items())
            line = f"prepare: about {left:.0f} minutes are left. From the beginning, in minutes: {others}."
            self._bar.write(line, file=sys.stderr)
        self._cheaper = {}

"""Lines and bars for the person at the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .progress import Progress as State
from .progress import Watch

#: Seconds between two lines about progress where there is no terminal to draw a bar on.
LINE_SECONDS = 15.0
#: A run is known so many seconds after its first token; one of more than so many is worth a word on how to cut it.
KNOWN_SECONDS, LONG_SECONDS = 20.0, 600.0


def say(console: Console, text: str) -> None:
    """One line, just as it is."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Clock:
    """How long a run still takes, by what it has done since its first token.

    The time before that, in which a model is loaded and a prompt is read for all caches, does not count: it would make
    the estimate many times too long.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._found: float | None = None
        self._first: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """Since the first state."""
        return time.monotonic() - self.started

    @property
    def measured(self) -> float:
        """Seconds since the first token; 0 before it."""
        return time.monotonic() - self._first[1] if self._first else 0.0

    def left(self, state: State) -> float | None:
        """Seconds; None while nothing is known."""
        done, now = state.finished + state.begun, time.monotonic()
        if self._found is None:
            self._found, self.started = done, now
        if self._first is None:
            self._first = (done, now) if done > self._found else None
            return None
        gained = done - self._first[0]
        return self.measured * (state.total - done) / gained if gained > 0 else None


def readable_time(seconds: float) -> str:
    """As a person says it: 40 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress(console: Console, unit: str, cuts: Callable[[int], str] | None = None) -> Iterator[Watch]:
    """Shows how far a run is, from the first call of the function it yields: as a bar, or as lines in a log.

    Args:
        cuts: given the number of rows, what makes a long run shorter; said once, as soon as it is known how long it
            takes.
    """
    clock, announced, shown = Clock(), cuts is None, -LINE_SECONDS
    columns = (
        f"{unit} ",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[last]}", markup=False),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(unit, total=None, last="", left="")

    def watch(state: State) -> None:
        nonlocal announced, shown
        left, seconds = clock.left(state), clock.seconds
        if cuts and left is not None and not announced and clock.measured > KNOWN_SECONDS:
            announced = True
            if left > LONG_SECONDS:
                shorter = cuts(state.total)
                say(console, f"note: about {readable_time(left)} left for {state.total:,} {unit}. Shorter: {shorter}")
        rest = f"{readable_time(left)} left" if left else ""
        if console.is_terminal:
            bar.start()
            bar.update(task, completed=state.finished + state.begun, total=state.total, last=state.last, left=rest)
        elif seconds - shown >= LINE_SECONDS or (state.finished == state.total and not state.last):
            shown = seconds
            times = f"{seconds:.0f} s, {rest}" if rest else f"{seconds:.0f} s"
            say(console, f"{state.finished}/{state.total} {unit}, {times} {state.last}".rstrip())

    try:
        yield watch
    finally:
        bar.stop()


def token_bar(console: Console, unit: str = "tokens") -> Progress:
    """Progress in tokens, or in another unit."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )

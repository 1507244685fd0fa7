"""Where a conversation is shown: on a terminal with a line that moves, or in a stream of text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from time import perf_counter

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..errors import UserError
from .figures import Footprint, status_line, status_text
from .voice import Listener

#: Seconds between two looks at the cache.
_INTERVAL = 0.1
_LONGEST_MESSAGE = 12
_EXPORT_WIDTH = 100
#: Of what the model says.
_ANSWER = "cyan"


class Screen:
    """Says what happens, and remembers it for an export.

    Args:
        piped: messages come from a pipe: answers go to the standard output, one per line, and all else to the
            standard error output.

    Attributes:
        moves: whether lines can be drawn over.
        notes: where everything but answers goes.
    """

    def __init__(self, *, piped: bool) -> None:
        # A pipe that is not text of the right kind is a mistake, see `run_chat`.
        for stream in (*([sys.stdin] if sys.stdin.isatty() else []), sys.stdout, sys.stderr):
            # A terminal without Unicode shows a question mark and goes on, and so does the model.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        self._piped = piped
        self._out = Console(highlight=False)
        self.moves = self._out.is_terminal and not self._out.is_dumb_terminal and not piped
        self.notes = self._out if self._out.is_terminal and not piped else Console(stderr=True, highlight=False)
        self._shown: list[RenderableType] = []

    def show(self, what: RenderableType) -> None:
        """Anything but messages and answers."""
        self._shown.append(what)
        self.notes.print(what)

    def say(self, text: str, style: str = "") -> None:
        """One line, as it is."""
        self.show(Text(text, style=style))

    def complain(self, error: UserError) -> None:
        """A mistake that the conversation survives."""
        self.say(f"error: {error}", "red")

    def heard(self, message: str, *, typed: bool) -> None:
        """A message; it stands on the terminal already if it was typed there."""
        text = Text("you> ", style="bold").append(Text(abridged(message), style="not bold"))
        self._shown.append(text)
        if not typed and not self._piped:
            self.notes.print(text)

    def answering(self, footprint: Callable[[], Footprint]) -> Answering:
        """Follows one answer, as a context."""
        if self.moves:
            return LiveAnswer(self._out, footprint)
        return LineAnswer(self._out) if self._piped else StreamedAnswer(self._out)

    def answered(self, text: str, footprint: Footprint, rate: float | None) -> None:
        """The answer has been shown; say what it cost."""
        line = status_line(footprint, rate)
        self._shown += [Text(text.strip(), style=_ANSWER), line]
        self.notes.print(line if self.moves else Text(f"[{status_text(footprint, rate)}]"), soft_wrap=not self.moves)

    def export(self, path: Path) -> None:
        """Write what was shown as a picture or a page, in the format that the name ends in.

        The command that asked for it is left out.

        Raises:
            OSError: it cannot be written.
        """
        width = min(self.notes.width, _EXPORT_WIDTH)
        recorder = Console(record=True, file=StringIO(), width=width, force_terminal=True, color_system="truecolor")
        for each in self._shown[:-1]:
            recorder.print(each, highlight=False)
        if path.suffix.lower() == ".svg":
            recorder.save_svg(str(path), title="paged-eviction chat")
        else:
            recorder.save_html(str(path))


class Answering(Listener):
    """Shows one answer; the base nothing of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = False

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

    def _print(self, text: str, end: str = "") -> None:
        self._console.print(Text(text), end=end, soft_wrap=True)

    def _opened(self, piece: str) -> str:
        """The piece, without blanks at the beginning of the answer."""
        piece = piece if self._begun else piece.lstrip()
        self._begun = self._begun or bool(piece)
        return piece


class LineAnswer(Answering):
    """One line per answer, when it is complete; a line break inside it is written as a backslash and an n."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._pieces: list[str] = []

    def text(self, piece: str) -> None:
        self._pieces.append(piece)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._print("\\n".join("".join(self._pieces).strip().splitlines()), "\n")


class StreamedAnswer(Answering):
    """Words as they come."""

    def text(self, piece: str) -> None:
        self._print(self._opened(piece))
        self._console.file.flush()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._print("\n")


class LiveAnswer(Answering):
    """Words as they come, above a line about the cache that moves down with them."""

    def __init__(self, console: Console, footprint: Callable[[], Footprint]) -> None:
        super().__init__(console)
        self._footprint = footprint
        # Drawn by this thread alone: another would read the cache in the middle of a forward.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._paragraph, self._doing, self._rate, self._drawn = "", "reading", 0.0, 0.0

    def __enter__(self) -> Answering:
        self._live.start()
        self._draw()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._live.update(Text(""))
        self._live.stop()
        if self._paragraph:
            self._console.print(Text(self._paragraph, style=_ANSWER))

    def reading(self, done: int, total: int) -> None:
        self._doing = f"reading {done:,} of {total:,} tokens"
        self._draw()

    def token(self, count: int, seconds: float) -> None:
        self._doing, self._rate = "", (count - 1) / seconds if seconds > 0 else 0.0
        self._draw_now_and_then()

    def text(self, piece: str) -> None:
        *complete, self._paragraph = (self._paragraph + self._opened(piece)).split("\n")
        if complete:
            self._live.update(self._picture())
            self._console.print(Text("\n".join(complete), style=_ANSWER))
        self._draw_now_and_then()

    def _draw_now_and_then(self) -> None:
        if perf_counter() - self._drawn >= _INTERVAL:
            self._draw()

    def _draw(self) -> None:
        self._drawn = perf_counter()
        self._live.update(self._picture(), refresh=True)

    def _picture(self) -> RenderableType:
        line = status_line(self._footprint(), self._rate or None, self._doing or None)
        if not self._paragraph:
            return line
        # A live area cannot be higher than the terminal: of a long paragraph, the end.
        lines = Text(self._paragraph, style=_ANSWER).wrap(self._console, self._console.width)
        return Group(*lines[-max(1, self._console.height - 5) :], line)


def abridged(message: str) -> str:
    """The beginning and the end of a long message."""
    lines = message.splitlines()
    if len(lines) <= _LONGEST_MESSAGE:
        return message
    return "\n".join([*lines[:2], f"... {len(lines) - 3} lines ...", lines[-1]])

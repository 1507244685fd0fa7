"""Where a conversation is shown: on a terminal with a map of the blocks that moves, or in a stream of text."""

from __future__ import annotations

import sys
from time import perf_counter

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from .answering import Listener
from .blocks import BlockMap
from .conversation import Answer, Conversation
from .figures import Footprint

#: Seconds between two looks at the cache, and layers that are looked at.
_INTERVAL, _LAYERS = 0.1, 3
_LONGEST_MESSAGE = 12
#: Of what the model says.
_ANSWER = "cyan"


class Screen:
    """Says what happens.

    Args:
        piped: messages come from a pipe: answers go to the standard output, one per line, and all else to the
            standard error output.

    Attributes:
        out: where answers go; `notes`: everything else.
        moves: whether lines can be drawn over.
    """

    def __init__(self, *, piped: bool) -> None:
        # A pipe that is not text of the right kind is a mistake, see `run_chat`.
        for stream in (*([sys.stdin] if sys.stdin.isatty() else []), sys.stdout, sys.stderr):
            # A terminal without Unicode shows a question mark and goes on, and so does the model.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        self._piped = piped
        self.out = Console(highlight=False)
        self.moves = self.out.is_terminal and not self.out.is_dumb_terminal and not piped
        self.notes = self.out if self.out.is_terminal and not piped else Console(stderr=True, highlight=False)

    def say(self, text: str, style: str = "") -> None:
        """One line, as it is."""
        self.notes.print(Text(text, style=style))

    def heard(self, message: str) -> None:
        """A message that nobody typed here: its beginning and its end."""
        lines = message.splitlines()
        if len(lines) > _LONGEST_MESSAGE:
            message = "\n".join([*lines[:2], f"... {len(lines) - 3} lines ...", lines[-1]])
        if not self._piped:
            self.notes.print(Text("you> ", style="bold").append(Text(message, style="not bold")))

    def print_answer(self, text: str) -> None:
        """An answer that is complete; to a pipe as one line, with a backslash and an n for a line break inside it."""
        text = "\\n".join(text.splitlines()) if self._piped else text
        self.out.print(Text(text, style=_ANSWER if self.moves else ""), soft_wrap=not self.moves)

    def answered(self, answer: Answer) -> None:
        """The answer has been shown; say what it cost."""
        line = answer.footprint.line(answer.tokens_per_second)
        self.notes.print(line if self.moves else Text(f"[{line}]"), soft_wrap=not self.moves)


class Answering(Listener):
    """One answer: while it comes, its end above a map of the blocks, where lines can be drawn over; then all of it."""

    def __init__(self, screen: Screen, talk: Conversation) -> None:
        super().__init__(talk.tokenizer)
        self._screen, self._cache = screen, talk.cache
        self._text, self._doing, self._drawn = "", "reading", 0.0
        # Drawn by this thread alone: another would read the cache in the middle of a forward.
        self._live = Live(console=screen.out, auto_refresh=False, transient=True) if screen.moves else None

    def __enter__(self) -> Answering:
        if self._live is not None:
            self._live.start()
        self._draw()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._text.strip() or error is None:
            self._screen.print_answer(self._text.strip())

    def reading(self, done: int, total: int) -> None:
        self._doing = f"reading {done:,} of {total:,} tokens"
        self._draw()

    def token(self) -> None:
        self._doing = ""
        self._draw(_INTERVAL)

    def text(self, piece: str) -> None:
        self._text += piece
        self._draw(_INTERVAL)

    def _draw(self, interval: float = 0.0) -> None:
        if self._live is not None and perf_counter() - self._drawn >= interval:
            self._drawn = perf_counter()
            self._live.update(self._picture(), refresh=True)

    def _picture(self) -> RenderableType:
        out, rate = self._screen.out, (self.count - 1) / self.seconds if self.count > 1 and self.seconds else None
        lines = Text(self._text.strip(), style=_ANSWER).wrap(out, out.width)[-max(1, out.height - _LAYERS - 8) :]
        held = [BlockMap(self._cache, _LAYERS)] if self._cache.get_seq_length() else []
        return Group(*(lines if self._text else ()), *held, Footprint.of(self._cache).line(rate, self._doing))

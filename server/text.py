"""Decode tokens to a stream of text, and end it at a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes an answer, and returns text as soon as no later token can change it.

    Args:
        decode: decodes consecutive tokens.
        stops: stop texts; the text ends before the first of them.
        before: tokens before the answer, which are decoded with it, because decoders drop the leading blank of the
            first token.

    Attributes:
        stopped: whether a stop text has come.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._decode, self._stops = decode, list(stops)
        self._before = list(before)
        self._tokens: list[int] = []
        self._first = self._next = 0
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """Take the next tokens. Returns the text that cannot change any more."""
        if self.stopped:
            return ""
        if self._before:
            self._go_on()
        self._tokens += tokens
        text = self._new_text()
        if text.endswith("\ufffd"):  # in the middle of a character
            return ""
        if text:
            self._first, self._next = self._next, len(self._tokens)
        return self._release(text)

    def _go_on(self) -> None:
        """Let the first tokens be decoded behind those before them, unless these end in the middle of a character."""
        if not self._decode(self._before).endswith("\ufffd"):
            self._tokens = self._before
            self._next = len(self._before)
        self._before = []

    def end(self) -> str:
        """End the tokens. Returns the rest of the text."""
        if self.stopped:
            return ""
        text = self._release(self._new_text())
        rest, self._held = self._held, ""
        self._first = self._next = len(self._tokens)
        return text + rest

    def _new_text(self) -> str:
        """What the tokens add that are not in the text yet. A few old ones are decoded with them, because a token may
        look otherwise after another."""
        old = self._decode(self._tokens[self._first : self._next])
        return self._decode(self._tokens[self._first :])[len(old) :]

    def _release(self, text: str) -> str:
        self._held += text
        places = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.stopped = True
            safe = min(places)
        else:
            safe = len(self._held) - max((begun(self._held, stop) for stop in self._stops), default=0)
        text, self._held = self._held[:safe], "" if self.stopped else self._held[safe:]
        return text


def begun(text: str, word: str) -> int:
    """Number of characters at the end of a text that may be the beginning of `word`."""
    longest = min(len(word) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(word[:count])), 0)

"""Tool calls that a model writes into its answer as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from .text import begun

#: Models whose chat templates name this (Hermes, Qwen) write their calls so.
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class _Written(BaseModel):
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One tool call.

    Attributes:
        name: name of the function.
        arguments: arguments as JSON.
        number: index among the calls of the answer.
        id: id with which the client sends the result.
    """

    name: str
    arguments: str
    number: int = 0
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def plain(self) -> dict[str, Any]:
        """The call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @classmethod
    def read(cls, text: str, number: int = 0) -> Call | None:
        """Parse the text between the tags; None if it is not a call."""
        try:
            written = _Written.model_validate_json(text)
            arguments = json.dumps(written.arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return None
        return cls(written.name, arguments, number)


class CallStream:
    """Takes calls out of a streamed text. Other text stays, except blanks around calls.

    Attributes:
        count: number of calls so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._held = ""
        self._behind_call = False

    def add(self, text: str) -> tuple[str, list[Call]]:
        """Take the next piece. Returns the text that cannot be part of a call, and the complete calls."""
        self._held += text
        outside, calls = self._take_closed()
        before, opened, _ = self._held.partition(OPEN)
        safe = (before if opened else before[: len(before) - begun(before, OPEN)]).rstrip()
        self._held = self._held[len(safe) :]
        return outside + self._text(safe), calls

    def end(self) -> tuple[str, list[Call]]:
        """End the text. Returns the rest of the text and calls; the last call may lack its closing tag."""
        if OPEN in self._held:
            outside, calls = self.add(CLOSE)
            if calls:
                return outside, calls
            self._held = outside.removesuffix(CLOSE)
        rest = self._text(self._held.rstrip() if self.count else self._held)
        self._held = ""
        return rest, []

    def _take_closed(self) -> tuple[str, list[Call]]:
        outside, calls = "", list[Call]()
        while True:
            before, opened, rest = self._held.partition(OPEN)
            inside, closed, after = rest.partition(CLOSE)
            if not closed:
                return outside, calls
            call, self._held = Call.read(inside, self.count), after
            if call is None:
                outside += self._text(before + opened + inside + closed)
            else:
                outside += self._text(before.rstrip())
                calls.append(call)
                self.count, self._behind_call = self.count + 1, True

    def _text(self, text: str) -> str:
        if self._behind_call:
            text = text.lstrip()
            self._behind_call = not text
        return text

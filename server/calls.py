"""Calls of tools that a model writes into its answer as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

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
    """One call.

    Attributes:
        name: of the function.
        arguments: as JSON.
        number: among the calls of its answer.
        id: that its result is sent back with.
    """

    name: str
    arguments: str
    number: int = 0
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def plain(self) -> dict[str, Any]:
        """As OpenAI spells it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @classmethod
    def read(cls, text: str, number: int = 0) -> Call | None:
        """The call that stands between the tags; None: what stands there is none."""
        try:
            written = _Written.model_validate_json(text)
            arguments = json.dumps(written.arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return None
        return cls(written.name, arguments, number)


class CallStream:
    """Takes calls out of a text that comes in pieces; what is no call stays text, blanks around calls do not.

    Attributes:
        count: calls so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._held = ""
        self._behind_call = False

    def add(self, text: str) -> tuple[str, list[Call]]:
        """Take the next piece; returns the text that is certain to be no part of a call, and the calls in it."""
        self._held += text
        outside, calls = self._take_closed()
        before, opened, _ = self._held.partition(OPEN)
        safe = (before if opened else before[: len(before) - begun(before, OPEN)]).rstrip()
        self._held = self._held[len(safe) :]
        return outside + self._text(safe), calls

    def end(self) -> tuple[str, list[Call]]:
        """There is no more text; returns the rest. The last call may lack its tag."""
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

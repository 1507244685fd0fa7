"""A bound on what is read of a request before anything is made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .refusals import Refused

#: Bytes of JSON for each token of a prompt, and for everything else.
_EACH, _REST = 64, 1 << 16
#: Seconds in which a body comes.
SECONDS = 60.0


def most_bytes(prompt_tokens: int) -> int:
    """Bytes of the longest body that is read where prompts have at most so many tokens."""
    return _REST + _EACH * prompt_tokens


class BoundedBody:
    """Middleware that reads a body whole, or refuses it.

    Args:
        app: what comes behind.
        most: bytes.
        count: told of the status of each refusal.
    """

    def __init__(self, app: Any, most: int, count: Callable[[int], None]) -> None:
        self._app, self._most, self._count = app, most, count

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request, as ASGI says."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(receive), SECONDS)
            if body is None:
                return
        except asyncio.TimeoutError:
            await self._refuse(Refused(f"The body did not come within {SECONDS:.0f} s.", status=408), scope, send)
        except Refused as refused:
            await self._refuse(refused, scope, send)
        else:
            await self._app(scope, _again(body, receive), send)

    async def _read(self, receive: Any) -> bytes | None:
        """The body; None: the client is gone."""
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            more, part = message.get("more_body", False), message.get("body", b"")
            size += len(part)
            if size <= self._most:
                body += part
            elif size > 2 * self._most:  # so far the rest was dropped, so that the client hears the refusal
                break
        if size > self._most:
            raise Refused(
                f"The body has more than {self._most} bytes, the most that this server reads: see --max-prompt-tokens.",
                status=413,
                code="body_too_large",
            )
        return bytes(body)

    async def _refuse(self, refused: Refused, scope: Any, send: Any) -> None:
        self._count(refused.status)
        await refused.response(scope, None, send)


def _again(body: bytes, receive: Any) -> Any:
    """The body once more, then what comes after it."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Any:
        return parts.pop() if parts else await receive()

    return received

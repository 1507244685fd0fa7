"""A limit on the size of request bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from .refusals import Refused

#: Bytes of JSON for each token of a prompt, and for everything else.
_EACH, _REST = 64, 1 << 16
#: Seconds in which a body comes.
SECONDS = 60.0


def bounded_route(prompt_tokens: int) -> type[APIRoute]:
    """Make a route class that refuses bodies longer than a prompt of so many tokens needs."""
    most = _REST + _EACH * prompt_tokens

    class BoundedRoute(APIRoute):  # type: ignore[misc]
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
            answer = super().get_route_handler()

            async def bounded(request: Request) -> Any:
                try:
                    parts = [{"type": "http.request", "body": await asyncio.wait_for(_read(request, most), SECONDS)}]
                except asyncio.TimeoutError:
                    raise Refused(f"The body did not arrive within {SECONDS:.0f} s.", status=408, code=None) from None

                async def receive() -> Any:
                    return parts.pop() if parts else await request.receive()

                return await answer(Request(request.scope, receive))

            return bounded

    return BoundedRoute


async def _read(request: Request, most: int) -> bytes:
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            body += part
        elif size > 2 * most:  # so far the rest was dropped, so that the client hears the refusal
            break
    if size > most:
        raise Refused(
            f"The body has more than {most} bytes, the most that this server accepts: see --max-prompt-tokens.",
            status=413,
            code="body_too_large",
        )
    return bytes(body)

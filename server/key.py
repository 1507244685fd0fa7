"""Requests without the key are turned away before anything is read of them."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

from .refusals import Refused


class Locked:
    """Middleware that lets requests pass which bring the key, and those for `/health`.

    Args:
        app: what comes behind.
        key: as `Authorization: Bearer KEY`.
        count: told of the status of each refusal.
    """

    def __init__(self, app: Any, key: str, count: Callable[[int], None]) -> None:
        self._app, self._wanted, self._count = app, f"Bearer {key}".encode(), count

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request, as ASGI says."""
        if scope["type"] == "http" and scope["path"] != "/health":
            brought = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(brought, self._wanted):
                self._count(401)
                refused = Refused(
                    "The key is missing or wrong: send the header 'Authorization: Bearer KEY'.",
                    status=401,
                    code="invalid_api_key",
                )
                await refused.response(scope, receive, send)
                return
        await self._app(scope, receive, send)

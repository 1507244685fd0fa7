"""Refuse requests without the API key before their bodies are read."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

from .refusals import Refused


def locked(app: Any, key: str, count: Callable[[int], None]) -> Any:
    """Middleware that passes on requests with `Authorization: Bearer KEY` and requests for `/health`, and refuses
    others.

    Args:
        app: the next application.
        count: called with the status of each refusal.
    """
    message = "The key is missing or wrong: send the header 'Authorization: Bearer KEY'."
    refused = Refused(message, status=401, code="invalid_api_key").response

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        brought = dict(scope.get("headers", ())).get(b"authorization", b"")
        free = scope["type"] != "http" or scope["path"] == "/health"
        if free or hmac.compare_digest(brought, f"Bearer {key}".encode()):
            await app(scope, receive, send)
        else:
            count(refused.status_code)
            await refused(scope, receive, send)

    return answer

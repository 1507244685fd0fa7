"""Requests without the key are turned away before anything is read of them."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

from .refusals import Refused


def locked(app: Any, key: str, count: Callable[[int], None]) -> Any:
    """Middleware that lets requests pass which bring the key as `Authorization: Bearer KEY`, and those for `/health`.

    Args:
        app: what comes behind.
        count: told of the status of each refusal.
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

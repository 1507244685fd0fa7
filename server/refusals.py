"""Error responses, always in OpenAI's format, so that clients show the message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .wire import TAGS

#: Seconds after which another try may be answered, by status.
_RETRY_AFTER = {429: 1, 503: 10}


class Refused(Exception):  # noqa: N818 (what happened, not a mistake of the program)
    """An error that refuses a request.

    Args:
        message: a sentence that says what to do instead.
        status: HTTP status.
        param: the wrong field of the body.
        code: a word for programs.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @classmethod
    def of(cls, param: str, reason: Any, code: str = "invalid_value") -> Refused:
        """Make the error for a wrong field of the body."""
        return cls(f"{param}: {reason}", param=param, code=code)

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        # A lone surrogate that a client sent cannot be encoded, and must not turn a refusal into a failure.
        text = self.message.encode("utf-8", "replace").decode("utf-8")
        return {"error": {"message": text, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The HTTP response."""
        after = _RETRY_AFTER.get(self.status)
        return JSONResponse(self.body, self.status, None if after is None else {"Retry-After": str(after)})


def failed(message: str) -> Refused:
    """Make the error of a request that failed without a mistake of the client, and without harm to others."""
    return Refused(message, status=500, code="internal_error")


def add_refusals(app: FastAPI, count: Callable[[int], None]) -> None:
    """Answer all errors in the same format.

    Args:
        count: called with the status of each error.
    """

    def answer(refused: Refused) -> JSONResponse:
        count(refused.status)
        return refused.response

    async def refused(request: Request, error: Refused) -> JSONResponse:
        return answer(error)

    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        # A body without the content type of JSON arrives here as bytes.
        unread = tuple(first["loc"]) == ("body",) and isinstance(first["input"], bytes)
        return answer(_of_type(request.headers.get("content-type")) if unread else _of_validation(first))

    async def unrouted(request: Request, error: HTTPException) -> JSONResponse:
        routes = ", ".join(sorted({getattr(route, "path", "") for route in app.routes}))
        unread = "The body cannot be read: lists are nested too deeply, or a number has thousands of digits."
        messages = {
            400: (unread, "invalid_json"),  # an error of the parser, which gives no reason
            404: (f"There is no {request.url.path} here. There are {routes}.", "not_found"),
        }
        message, code = messages.get(error.status_code, (f"{str(error.detail).rstrip('.')}.", None))
        response = answer(Refused(message, status=error.status_code, code=code))
        response.headers.update(error.headers or {})  # which methods there are
        return response

    async def broken(request: Request, error: Exception) -> JSONResponse:
        return answer(failed("The server failed; its log says why."))

    handlers: dict[Any, Any] = {
        Refused: refused,
        ClientDisconnect: gone,
        RequestValidationError: invalid,
        HTTPException: unrouted,
        Exception: broken,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _of_type(kind: str | None) -> Refused:
    """A body that is not said to be JSON: pages in a browser may send such ones to any server without asking it."""
    return Refused(
        f"The body has {'the type ' + kind if kind else 'no type'}: send JSON, with the header "
        "'Content-Type: application/json' (curl: -H 'Content-Type: application/json').",
        status=415,
        code="unsupported_media_type",
    )


def _of_validation(first: Any) -> Refused:
    """The first of the mistakes that were found in a body."""
    place = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid" and isinstance(place[0], int):  # not that of a field in it
        return Refused(f"The body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}.", code="invalid_json")
    # Of alternatives pydantic names the one that was read, too: only names of fields and places in lists are for the
    # client.
    names = [part for part in place if part not in TAGS]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")
    named = first.get("ctx", {}).get("param")
    if named is not None:
        param = f"{param}.{named}".lstrip(".")
    if first["type"] == "extra_forbidden":
        return Refused.of(param, "this server has no such field. Leave it out.", "unsupported_parameter")
    if first["type"] == "unsupported":
        return Refused.of(param, f"{first['msg']}. Leave it out.", "unsupported_value")
    return Refused(f"{param or 'The body'}: {first['msg']}.", param=param or None)

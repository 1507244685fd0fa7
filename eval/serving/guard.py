"""What a request may ask of a server whose requests share one batch."""

from __future__ import annotations

import logging
from typing import Any

#: Settings that continuous batching has once for all requests.
_SHARED = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "stop_strings")
#: Where a request says how long its answer may become.
_LENGTHS = {"max_tokens", "max_completion_tokens", "max_output_tokens", "generation_config"}
_HANDLERS = ("_chat_handler", "_completion_handler", "_response_handler")


class Guard:
    """Stands before the handlers of a server: one model, no name twice, no answer without an end.

    Args:
        served: transformers' `Serve`, not listening yet.
        name: what requests may call the model besides the name that transformers knows it by.
        generating: transformers' `CBGenerateManager`, whose batching has begun.
        most_new_tokens: most that a request may ask for.
    """

    def __init__(self, served: Any, name: str, generating: Any, most_new_tokens: int) -> None:
        self._name, self._known_as = name, served._model_manager.force_model
        self._batching, self._most = generating._cb, most_new_tokens
        self._ignored: set[str] = set()
        self._served = served
        self._log = logging.getLogger("uvicorn.error")
        for name in _HANDLERS:
            handler = getattr(served, name)
            handler.handle_request = _before(handler.handle_request, self.check)
            handler._build_generation_config = self._checked(handler._build_generation_config)
        self._close_routes(served.server.config.app)
        for name in ("generate_streaming", "generate_non_streaming"):
            setattr(generating, name, _with_a_prompt(getattr(generating, name)))

    def announce(self) -> None:
        """Say what is served, in the server's log."""
        config = self._batching.continuous_batching_config
        self._log.warning(
            "Serving %s: at most %d tokens per request and layer, %s pages of %d tokens; see /metrics",
            self._name,
            self._batching.options.budget,
            config.num_blocks,
            config.page_size,
        )

    # ---- requests -------------------------------------------------------------------------------------------------

    def check(self, body: dict[str, Any], request_id: str) -> None:
        """Refuse what would disturb other requests.

        Raises:
            HTTPException: 409 for the name of a live request.
        """
        from fastapi import HTTPException

        if body.get("model") == self._name:
            body["model"] = self._known_as
        if request_id in self._batching.output_router.result_handlers:
            raise HTTPException(409, f"A request named {request_id!r} is live already: choose another X-Request-ID.")

    def _checked(self, build: Any) -> Any:
        from fastapi import HTTPException

        def checked(body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            try:
                settings = build(body, *args, **kwargs)
            except (TypeError, ValueError) as error:  # JSON that is none, numbers that are none
                raise HTTPException(400, f"These settings cannot be read: {error}") from error
            if not _LENGTHS & body.keys():
                settings.max_new_tokens = min(settings.max_new_tokens, self._most)
            reason = self._why_not(settings)
            if reason is not None:
                raise HTTPException(400, reason)
            self._say_what_is_ignored(settings)
            return settings

        return checked

    def _why_not(self, settings: Any) -> str | None:
        most, asked = self._most, settings.max_new_tokens
        if not isinstance(asked, int) or not 1 <= asked <= most:
            return f"A request may ask for 1 to {most} new tokens, got {asked}."
        for name in ("num_return_sequences", "num_beams"):
            if (getattr(settings, name, None) or 1) != 1:
                return f"{name} is {getattr(settings, name)}: ask several times instead."
        return None

    def _say_what_is_ignored(self, settings: Any) -> None:
        held = self._batching.generation_config
        asked = {name for name in _SHARED if getattr(settings, name, None) != getattr(held, name, None)}
        for name in asked - self._ignored:
            self._ignored.add(name)
            self._log.warning(
                "A request set %s=%r, which is ignored: continuous batching samples for all requests as the model's "
                "generation_config says (%r). This is said once.",
                *(name, getattr(settings, name), getattr(held, name, None)),
            )

    # ---- routes ---------------------------------------------------------------------------------------------------

    def _close_routes(self, app: Any) -> None:
        """One model is served: nobody unloads it or loads another."""
        from fastapi import Request
        from fastapi.responses import JSONResponse

        load = self._served._model_manager.load_model_streaming

        def load_ours(name: str, *args: Any, **kwargs: Any) -> Any:
            from fastapi import HTTPException

            if name != self._served._model_manager.process_model_name(self._known_as):
                raise HTTPException(403, f"This server serves {self._name!r} only.")
            return load(name, *args, **kwargs)

        self._served._model_manager.load_model_streaming = load_ours

        @app.middleware("http")  # type: ignore[untyped-decorator]
        async def closed(request: Request, call_next: Any) -> Any:
            if request.url.path == "/reset":
                return JSONResponse({"error": "This server keeps its model."}, status_code=403)
            return await call_next(request)


def _with_a_prompt(generate: Any) -> Any:
    """Refuse a prompt without tokens, before it becomes a request."""
    from fastapi import HTTPException

    def checked(model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not inputs["input_ids"]:
            raise HTTPException(400, "The prompt is empty: a request needs at least one token.")
        return generate(model, processor, inputs, *args, **kwargs)

    return checked


def _before(handle: Any, check: Any) -> Any:
    async def checked(body: dict[str, Any], request_id: str) -> Any:
        check(body, request_id)
        return await handle(body, request_id)

    return checked

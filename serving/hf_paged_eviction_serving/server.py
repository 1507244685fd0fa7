"""transformers' own server, `transformers serve`, with a budget for every request.

transformers' server makes its classes itself, so `serve` puts these subclasses in their places while it does, and only
then. It runs in a process of its own: `python -m hf_paged_eviction_serving`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from transformers.cli.serve import Serve
from transformers.cli.serving import chat_completion, completion, model_manager, response, server, utils

from .asked import refuse_unserved, sampling_of
from .batching import paged_batching
from .sampler import Sampler

#: Routes that are taken away: they load or unload models, or generate without a budget.
WITHOUT = ("/load_model", "/reset", "/v1/systemone", "/v1/audio/transcriptions")
_SAMPLER, _SALT = "_paged_eviction_sampler", "_paged_eviction_salt"


class _Models(model_manager.ModelManager):  # type: ignore[misc]
    """Enters `paged_batching` for the model that is loaded at the start; no other is loaded."""

    options: Mapping[str, Any]
    stack: ExitStack

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super()._load_model(*args, **kwargs)
        self.stack.enter_context(paged_batching(model, **self.options))
        return model


class _Door:
    """A manager of `paged_batching`, whose requests bring their own sampler and salt.

    Args:
        manager: the manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.own: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def add_request(self, input_ids: Any, request_id: str, **kwargs: Any) -> Any:
        return self._manager.add_request(input_ids, request_id=request_id, **kwargs, **self.own.pop(request_id))


class _Requests(utils.CBGenerateManager):  # type: ignore[misc]
    """Hands each request's own sampling on."""

    _cb: Any

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Make the manager at the first call, with nothing of a request in what all share."""
        if self._cb is None:
            shared = deepcopy(model.generation_config)
            shared.do_sample, shared.use_cache = False, False
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
                setattr(shared, name, None)  # samplers do all of this
            super().init_cb(model, shared)
            self._cb = _Door(self._cb)

    def _prepare(self, inputs: Any, config: Any, request_id: str) -> str:
        """Note what a request brings; returns an id that no other has, whatever id the client sent."""
        if not inputs["input_ids"]:
            raise HTTPException(400, "The prompt is empty: a request needs at least one token.")
        name = f"{request_id}-{uuid4().hex}"
        salt = getattr(config, _SALT)
        self._cb.own[name] = {"sampler": Sampler(getattr(config, _SAMPLER))} | ({} if salt is None else {"salt": salt})
        return name

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        """See `CBGenerateManager.generate_streaming`."""
        name = self._prepare(inputs, gen_config, request_id)
        with _in_words():
            return super().generate_streaming(model, processor, inputs, gen_config, name, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """See `CBGenerateManager.generate_non_streaming`. A request whose client goes away is cancelled."""
        name = self._prepare(inputs, gen_config, request_id)
        try:
            with _in_words():
                return await super().generate_non_streaming(model, processor, inputs, gen_config, name)
        except RuntimeError as error:
            raise HTTPException(500, str(error)) from error
        except asyncio.CancelledError:
            self._cb.cancel_request(name)
            raise


class _State(utils.GenerationState):  # type: ignore[misc]
    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """Whether a request is served in a batch; one that is not would have no budget, and is refused."""
        if not super().use_continuous_batching(model, modality):
            raise HTTPException(400, "This server answers requests of text to a language model only.")
        return True


class _Asked:
    """Reads what a request asks of its answer."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        with _in_words():
            return await super().handle_request(body, request_id)  # type: ignore[misc]

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)  # type: ignore[misc]
        with _in_words():
            refuse_unserved(body)

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False) -> Any:
        with _in_words():
            # A seed is of one request; transformers would set that of the process.
            others = {name: value for name, value in body.items() if name != "seed"}
            config = super()._build_generation_config(others, model_generation_config, use_cb=use_cb)  # type: ignore[misc]
            own = model_generation_config if body.get("generation_config") is None else None
            setattr(config, _SAMPLER, sampling_of(body, config, own))
            setattr(config, _SALT, body.get("prompt_cache_key"))
        return config


class _Chats(_Asked, chat_completion.ChatCompletionHandler):  # type: ignore[misc]
    pass


class _Completions(_Asked, completion.CompletionHandler):  # type: ignore[misc]
    pass


class _Responses(_Asked, response.ResponseHandler):  # type: ignore[misc]
    pass


@contextmanager
def _in_words() -> Iterator[None]:
    """Answer status 400, with the reason, where what a request asks for is wrong."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise HTTPException(400, str(error)) from error


async def _in_shape(request: Request, error: Any) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return JSONResponse({"error": {"message": str(error.detail), "type": kind}}, status_code=error.status_code)


def _build(models: Any, chats: Any, **parts: Any) -> FastAPI:
    """transformers' application without some of its routes; what cannot be served ends the start."""
    app = server_build(models, chats, **parts)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in WITHOUT]
    app.add_exception_handler(HTTPException, _in_shape)
    (loaded,) = models.loaded_models.values()
    name = models.process_model_name(models.force_model)
    parts["generation_state"].get_manager(name, use_cb=True).init_cb(loaded.model, None)
    return app


server_build = server.build_server


@contextmanager
def serve(model: str, options: Mapping[str, Any], **settings: Any) -> Iterator[Serve]:
    """Run transformers' server; the `with` block runs when it has stopped, or at once with `non_blocking=True`.

    Args:
        model: a folder or a name on the Hub.
        options: arguments of `paged_batching`.
        **settings: arguments of `transformers.cli.serve.Serve`.

    Raises:
        TypeError, ValueError: the options or the model cannot work; the message says what would.
    """
    with ExitStack() as stack:
        own = type("_BoundModels", (_Models,), {"options": options, "stack": stack})
        replaced = [
            (model_manager, "ModelManager", own),
            (utils, "CBGenerateManager", _Requests),
            (utils, "GenerationState", _State),
            (chat_completion, "ChatCompletionHandler", _Chats),
            (completion, "CompletionHandler", _Completions),
            (response, "ResponseHandler", _Responses),
            (server, "build_server", _build),
        ]
        with ExitStack() as places:
            for module, name, subclass in replaced:
                places.enter_context(patch.object(module, name, subclass))
            running = Serve(model, continuous_batching=True, **settings)
        yield running

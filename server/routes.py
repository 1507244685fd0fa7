"""The routes of the server."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

import hf_paged_eviction

from .answers import Answer, ChatForm, CompletionForm, Form, Piece, usage
from .body import bounded_route
from .engine import Engine, Job
from .key import locked
from .options import ServeOptions
from .prompts import Prompt, Prompts
from .refusals import Refused, add_refusals, failed
from .sampling import Sampler, Sampling
from .wire import MOST_ANSWERS, ChatRequest, CompletionRequest, GenerationRequest, StreamOptions

#: Fields of a request that are fields of `Sampling`.
_SAMPLING = {field.name for field in fields(Sampling)} & GenerationRequest.model_fields.keys()
#: Tokens with log probabilities that are written elsewhere than where everybody is answered.
_MANY = 100


@dataclass(frozen=True)
class Served:
    """The model and its settings that a server serves.

    Attributes:
        name: name of the model in requests.
        engine: passes requests to the model.
        prompts: tokenises requests.
        sampling: sampling options of the model's `generation_config`.
        ends: tokens that end an answer.
        contexts: saved contexts by name.
        options: options of the command.
    """

    name: str
    engine: Engine
    prompts: Prompts
    sampling: Sampling
    ends: frozenset[int]
    contexts: Mapping[str, Any]
    options: ServeOptions

    @property
    def card(self) -> dict[str, Any]:
        """The entry of the model in the list of models."""
        return {"id": self.name, "object": "model", "created": _STARTED, "owned_by": "hf_paged_eviction"}

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model."""
        if name not in (None, self.name):
            message = f"There is no model {name!r}: this server serves only {self.name!r}."
            raise Refused(message, status=404, param="model", code="model_not_found")

    def ends_of(self, body: GenerationRequest) -> frozenset[int]:
        """The tokens that end the answers to a request. Refuses ids outside the vocabulary."""
        more = body.stop_token_ids or []
        self.prompts.check_tokens(more, "stop_token_ids")
        return frozenset(more) if body.ignore_eos else self.ends.union(more)

    def context(self, name: str | None) -> Any:
        """The context that a request continues; None = none. Refuses an unknown name."""
        if name is not None and name not in self.contexts:
            loaded = ", ".join(map(repr, self.contexts)) or "none (start the server with --context)"
            raise Refused.of("context", f"there is no context {name!r}. Contexts: {loaded}.", "context_not_found")
        return None if name is None else self.contexts[name]


_STARTED = int(time.time())


def make_app(served: Served) -> FastAPI:
    """Make the application."""
    # Its pages of documentation would load scripts from elsewhere; /openapi.json is what they show.
    app = FastAPI(title="paged-eviction serve", version=hf_paged_eviction.__version__, docs_url=None, redoc_url=None)
    app.state.served, engine = served, served.engine
    add_refusals(app, engine.meter.refuse)
    app.router.route_class = bounded_route(served.prompts.limits.prompt)
    # A middleware runs before those that were added before it.
    key, origins = served.options.key, served.options.allow_origin
    if key is not None:
        app.add_middleware(locked, key=key, count=engine.meter.refuse)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        async def read() -> list[Prompt]:
            roles = served.options.protected_roles if body.protect is None else body.protect
            plain = [message.plain for message in body.messages]
            return [await served.prompts.of_chat(plain, roles, body.offered, body.chat_template_kwargs or {})]

        return await _respond(served, request, body, read, ChatForm)

    async def completions(body: CompletionRequest, request: Request) -> Response:
        async def read() -> list[Prompt]:
            goes_on, texts = body.context is not None, body.prompts[: MOST_ANSWERS + 1]
            return [await served.prompts.of_text(prompt, goes_on, body.protect) for prompt in texts]

        return await _respond(served, request, body, read, CompletionForm)

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served.card]}

    async def model(name: str) -> dict[str, Any]:
        served.check_model(name)
        return served.card

    async def metrics() -> Response:
        return Response(engine.meter.as_text(), media_type="text/plain; version=0.0.4")

    async def health() -> Response:
        return engine.trouble.response if engine.trouble is not None else JSONResponse({"status": "ok"})

    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    for path, read in (
        ("/v1/models", models),
        ("/v1/models/{name:path}", model),
        ("/metrics", metrics),
        ("/health", health),
    ):
        app.add_api_route(path, read)
        app.add_api_route(path, read, methods=["HEAD"], include_in_schema=False)
    for path in {str(getattr(route, "path", "")) for route in app.routes}:
        app.add_api_route(path, _methods(app, path), methods=["OPTIONS"], include_in_schema=False)
    return app


def _methods(app: FastAPI, path: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    """Answers which methods a path has. Only --allow-origin lets pages of other origins use them."""
    methods = {method for route in app.routes if getattr(route, "path", "") == path for method in route.methods}
    allowed = ", ".join(sorted(methods | {"OPTIONS"}))

    async def options() -> Response:
        return Response(status_code=204, headers={"Allow": allowed})

    return options


async def _respond(
    served: Served,
    request: Request,
    body: GenerationRequest,
    read: Callable[[], Coroutine[Any, Any, list[Prompt]]],
    kind: type[Form],
) -> Response:
    """The response to a request, whole or streamed."""
    served.check_model(body.model)
    form = kind(served.name, served.prompts, body.alternatives is not None)
    job: Job | None = None
    response = None
    try:
        job = served.engine.open(request, body.n or 1)
        prompts = await job.wait_for(read())
        answers, form.warning = _ask(served, job, body, prompts)

        def used() -> dict[str, Any]:
            return usage(sum(len(prompt.tokens) for prompt in prompts), sum(answer.tokens for answer in answers))

        if body.stream:
            how = body.stream_options or StreamOptions()
            running_usage = used if how.include_usage and how.continuous_usage_stats else None
            response = _Stream(_events(form, job, answers, running_usage, used if how.include_usage else None), job)
            return _warned(response, form)
        pieces: list[list[Piece]] = [[] for _ in answers]
        async for index, piece in _pieces(job, answers):
            pieces[index].append(piece)
        # In a thread, not in the loop: thousands of tokens with alternatives are many MB.
        return _warned(await asyncio.to_thread(lambda: JSONResponse(form.whole(pieces, used()))), form)
    except (Refused, ClientDisconnect):
        raise
    except Exception as error:
        logging.getLogger(__name__).exception("A request failed; the others go on.")
        raise failed("The server failed to answer this request; its log says why.") from error
    finally:
        if response is None and job is not None:
            job.close()


def _warned(response: Response, form: Form) -> Response:
    """The response, with the warning of its answers in its head, too."""
    if form.warning is not None:
        response.headers["Warning"] = f'299 - "{form.warning}"'
    return response


def _ask(served: Served, job: Job, body: GenerationRequest, prompts: list[Prompt]) -> tuple[list[Answer], str | None]:
    """Request the answers to these prompts, `n` for each. Returns them, and a warning if they may be shorter than the
    client asked for."""
    count = len(prompts) * (body.n or 1)
    if not 1 <= count <= MOST_ANSWERS:
        raise Refused.of(
            "n", f"the request asks for {count} answers; the limit is 1 to {MOST_ANSWERS} (prompts times n)."
        )
    context = served.context(body.context)
    before = 0 if context is None else context.seen
    most = [served.prompts.most_new(prompt.tokens, body.max_tokens, before) for prompt in prompts]
    for prompt in prompts:
        served.engine.check_sizes(prompt, context, body.kv_budget)
    sampling, ends = _sampling(served, body), served.ends_of(body)
    job.reserve(count)
    more = {"context": context, "salt": body.prompt_cache_key, "budget": body.kv_budget}
    how = {"echo": body.echoes, "calls": bool(body.offered) and served.prompts.tags_calls}
    answers: list[Answer] = []
    for prompt, new in zip(prompts, most, strict=True):
        for number in range(body.n or 1):
            sampler = Sampler(sampling).sibling(number)
            # A prompt alone is read as if one token were asked for.
            job.ask(len(answers), prompt, max(new, 1), ends, sampler, **more)
            answers.append(Answer(served.prompts, prompt, body.stop, ends, sampler, alone=not new, **how))
    least, wanted = min(most), body.max_tokens
    if wanted is None or wanted <= least:
        return answers, None
    return answers, f"max_tokens is more than there is room for: at most {least} tokens are generated."


async def _pieces(job: Job, answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece]]:
    """Yield the index and the next piece of each answer, until all are complete."""
    async for index, output in job.outputs():
        try:
            piece = answers[index].hear(output)
        except Exception as error:  # of the tokenizer, which is the model's: it may fail in any way
            logging.getLogger(__name__).exception("An answer could not be written.")
            raise failed(f"The tokenizer of this model cannot write the answer: {error}") from error
        if piece.end is not None:
            job.over(index, "length" if piece.end == "length" else "stop")
        yield index, piece


def _sampling(served: Served, body: GenerationRequest) -> Sampling:
    settings = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    if body.top_p == 0:
        settings["top_p"] = sys.float_info.min
    settings["top_k"] = max(settings.get("top_k", served.sampling.top_k), 0)  # -1 is all, too
    settings["logit_bias"] = bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    served.prompts.check_tokens(bias, "logit_bias")
    alternatives = body.alternatives
    return replace(
        served.sampling, **settings, logprobs=alternatives, prompt_logprobs=body.echoes and alternatives is not None
    )


class _Stream(StreamingResponse):  # type: ignore[misc]
    """Server-sent events; with them the job is over, however they end."""

    def __init__(self, events: AsyncIterator[str], job: Job) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.close()


async def _events(form: Form, job: Job, answers: Sequence[Answer], running_usage: Any, used: Any) -> AsyncIterator[str]:
    """Answers as server-sent events."""
    try:
        for index in range(len(answers)):
            first = form.begin(index)
            if first is not None:
                yield _event(first)
        async for index, piece in _pieces(job, answers):
            if piece.text or piece.chosen or piece.calls or piece.end:
                more = {} if running_usage is None else {"usage": running_usage()}
                event = partial(_part, form, index, piece, more)
                yield await asyncio.to_thread(event) if len(piece.chosen) > _MANY else event()
        if used is not None:
            yield _event(form.usage(used()))
        yield "data: [DONE]\n\n"
    except ClientDisconnect:
        return
    except Refused as refused:
        yield _event(refused.body)
    except Exception:
        logging.getLogger(__name__).exception("An answer could not be streamed.")
        yield _event(failed("The server failed; its log says why.").body)


def _part(form: Form, index: int, piece: Piece, more: dict[str, Any]) -> str:
    return _event(form.part(index, piece, **more))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"

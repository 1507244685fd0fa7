"""Connects the HTTP loop to the generation thread."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from .metrics import Meter
from .prompts import Prompt
from .refusals import Refused, failed
from .sampling import Sampler

T = TypeVar("T")


class Engine:
    """Passes requests to a manager of continuous batching, and cancels them when their clients go away.

    Args:
        manager: running manager of `paged_batching`.
        meter: counts events.
        places: largest number of answers that are running or waiting.
    """

    def __init__(self, manager: Any, meter: Meter, places: int) -> None:
        self.manager, self.meter, self._places = manager, meter, places
        self._jobs: set[Job] = set()
        self._closed = False

    @property
    def trouble(self) -> Refused | None:
        """The reason why no request can be served; None = requests can be served."""
        if self.dead:
            return Refused("Generation has stopped, and the server ends; its log says why.", status=503, code="dead")
        if self._closed:
            return Refused("This server is shutting down.", status=503, code="stopping")
        return None

    @property
    def dead(self) -> bool:
        """Whether the thread that generates has ended, because a whole step failed."""
        return not self.manager.is_running()

    def open(self, request: Request, answers: int) -> Job:
        """Open a job for one HTTP request. The caller must close it; it ends when the client goes away.

        Args:
            answers: number of answers that are known to be requested.

        Raises:
            Refused: no job can be opened now; the message gives the reason.
        """
        if self.trouble is not None:
            raise self.trouble
        self.check_queue(answers)
        job = Job(self, request, answers)
        self._jobs.add(job)
        return job

    def check_queue(self, more: int) -> None:
        """Refuse so many additional answers if there is no place for them."""
        live = sum(job.places for job in self._jobs)
        if live + more > self._places:
            raise Refused(
                f"{live} answers are running or waiting; this server takes at most {self._places}. Try again later.",
                status=429,
                code="rate_limit_exceeded",
            )

    def check_sizes(self, prompt: Prompt, context: Any, budget: int | None) -> None:
        """Refuse an invalid budget, invalid spans, and spans that leave no room in the budget."""
        param, options = "kv_budget", self.manager.options
        try:
            options.sizes_of(budget, context)
            param = "protect"
            options.spans_of(prompt.protected, budget, context)
        except (TypeError, ValueError) as error:
            raise Refused.of(param, error) from error

    def forget(self, job: Job) -> None:
        """Remove a closed job."""
        self._jobs.discard(job)
        self.manager.drop_unheard()

    def close(self) -> None:
        """Open no more jobs."""
        self._closed = True

    def end_all(self) -> None:
        """End all open jobs with an error."""
        for job in self._jobs:
            job.end(Refused("This server stopped before the answer was complete.", status=503, code="stopping"))


async def _until_gone(request: Request, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.end(ClientDisconnect())


class Job:
    """One HTTP request: first its prompts are tokenised, then answers are generated.

    Only the newest output of each answer is kept, because it holds all tokens. So a slow client uses no more memory.

    Attributes:
        places: number of answers that the job counts for: first the requested ones, later the incomplete ones.
    """

    def __init__(self, engine: Engine, request: Request, places: int) -> None:
        self._engine, self.places = engine, places
        self._newest: dict[int, Any] = {}
        self._ended: Exception | None = None
        self._heard = asyncio.Event()
        self._name = uuid.uuid4().hex
        self._live: dict[int, _Times] = {}
        self._watch = asyncio.create_task(_until_gone(request, self))

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a result as long as the client waits.

        Raises:
            Refused: the server stopped.
            ClientDisconnect: nobody waits any more.
        """
        task, ended = asyncio.create_task(work), asyncio.create_task(self._heard.wait())
        try:
            await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
            if self._ended is not None:
                raise self._ended
            return task.result()
        finally:
            task.cancel()
            ended.cancel()

    def reserve(self, answers: int) -> None:
        """Set the number of requested answers. Refuses them if there is no place."""
        self._engine.check_queue(answers - self.places)
        self.places = answers

    def close(self) -> None:
        """Cancel all answers, and remove the job."""
        self._watch.cancel()
        for index in list(self._live):
            self._engine.manager.cancel_request(self._request(index))
            self._over(index, "cancelled")
        self._engine.forget(self)

    def ask(self, index: int, prompt: Prompt, most: int, ends: frozenset[int], sampler: Sampler, **more: Any) -> None:
        """Request an answer of at most so many tokens.

        Args:
            index: index of the answer, which `outputs` yields with its tokens.
            ends: tokens that end the answer.
            more: `context`, `salt` and `budget` of `BoundedManager.add_request`.

        Raises:
            Refused: the server cannot generate any more.
        """
        manager, name = self._engine.manager, self._request(index)
        more |= {"max_new_tokens": most, "streaming": True, "sampler": sampler, "eos_token_id": sorted(ends) or -1}
        added = None
        manager.register_result_handler(name, partial(self._hear, index))
        try:
            added = manager.add_request(prompt.tokens, name, protect=prompt.protected, **more)
        finally:
            if added is None:
                manager.cancel_request(name)
        if added is None:
            raise self._engine.trouble or Refused("The request was not accepted.", status=503, code=None)
        self._live[index] = _Times()
        self._engine.meter.prompt_tokens.observe(len(prompt.tokens))

    async def outputs(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield the index and transformers' output of each answer that has grown, until all are complete.

        Raises:
            Refused: an answer failed.
            ClientDisconnect: nobody waits any more.
        """
        while self._live:
            await self._heard.wait()
            self._heard.clear()
            if self._ended is not None:
                raise self._ended
            newest, self._newest = self._newest, {}
            for index, output in newest.items():
                if index not in self._live:  # the answer was cancelled
                    continue
                if output.error is not None:
                    self._over(index, "failed")
                    raise self._engine.trouble or failed(f"The request failed: {output.error}")
                self._live[index].note(len(output.generated_tokens), self._engine.meter)
                yield index, output

    def over(self, index: int, end: str) -> None:
        """Note that an answer is complete, and cancel its generation."""
        if end == "stop":
            self._engine.manager.cancel_request(self._request(index))
        self._over(index, end)

    def end(self, reason: Exception) -> None:
        """Let `outputs` raise this error instead of yielding the next output."""
        self._ended = reason
        self._heard.set()

    def _request(self, index: int) -> str:
        return f"{self._name}-{index}"

    def _hear(self, index: int, output: Any) -> None:
        self._newest[index] = output
        self._heard.set()

    def _over(self, index: int, end: str) -> None:
        times = self._live.pop(index, None)
        if times is not None:
            self._engine.meter.ended.labels(end).inc()
            times.close(self._engine.meter)
            self.places -= 1


class _Times:
    """When an answer began, and grew."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._tokens = 0

    def note(self, tokens: int, meter: Meter) -> None:
        now, new = time.perf_counter(), tokens - self._tokens
        if new and not self._tokens:
            meter.first_token.observe(now - self._last)
        elif new:
            meter.token.observe((now - self._last) / new)
        self._last, self._tokens = now, tokens

    def close(self, meter: Meter) -> None:
        meter.answer.observe(time.perf_counter() - self._began)
        meter.answer_tokens.observe(self._tokens)


def stop(manager: Any, seconds: float) -> bool:
    """Stop the generation thread after its present forward; False if that takes too long."""
    with suppress(RuntimeError):
        manager.stop(hard_stop=True, timeout=seconds)
    return not manager.is_running()

"""Serve a model over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models.device import model_settings
from hf_paged_eviction_eval.models.loading import load_config, load_model, load_tokenizer, resolve_dtype
from hf_paged_eviction_eval.options.settings import Settings

from .options import ServeOptions

if TYPE_CHECKING:
    import torch

    from hf_paged_eviction.serving.options import ServingOptions

NEEDS = "fastapi, uvicorn and prometheus_client are needed: pip install 'hf_paged_eviction[serve]'"
#: Longest prompt, if neither the model nor the user sets a limit.
_LONGEST_PROMPT = 32768
#: What of a model's `generation_config` is followed, or says nothing about which tokens are chosen.
_FOLLOWED = frozenset(
    "do_sample temperature top_p top_k min_p repetition_penalty bos_token_id eos_token_id pad_token_id max_length "
    "max_new_tokens use_cache transformers_version cache_implementation".split()
)
#: Seconds after the grace in which connections are closed and a forward comes to its end; what has not is left. The
#: documentation says two: the rest is for a busy machine.
_AFTER_GRACE = 1.0


def serve(options: ServeOptions, ready: Callable[[Any], None] | None = None) -> int:
    """Serve until an interrupt, or until generation fails for all requests.

    Args:
        ready: called with the server just before it listens.

    Returns:
        The exit status of the process: 1 = generation failed, so that a supervisor starts the server anew.

    Raises:
        UserError: an option is missing, or options cannot be combined; the message says what to do.
    """
    try:
        import uvicorn  # noqa: F401

        from .engine import stop
        from .routes import make_app
    except ImportError as error:
        raise UserError(f"{NEEDS} ({error})") from error
    settings = model_settings(options)
    _check_early(options, settings)
    tokenizer = load_tokenizer(settings)
    if options.protected_roles and not (getattr(tokenizer, "chat_template", None) and tokenizer.is_fast):
        raise UserError(
            "--protect needs a chat template and a fast tokenizer, which this model lacks; leave it out, and let "
            'requests to /v1/completions protect spans of their tokens, "protect": [[0, 64]]'
        )
    model = load_model(settings)
    with ExitStack() as stack:
        served, manager = _bounded(stack, options, model, tokenizer)
        server = _server(make_app(served), served.engine, options)
        for line in _announcement(served, manager, model):
            logging.getLogger("uvicorn.error").info(line)
        if ready is not None:
            ready(server)
        try:
            server.run()
        finally:
            ended = stop(manager, server.seconds_left) & served.prompts.stop(server.seconds_left)
            server.over()
            if not ended:
                leave(server.status)
    return int(server.status)


def leave(status: int) -> None:
    """End the process at once, even if threads are still running."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _check_early(options: ServeOptions, settings: Settings) -> None:
    """What can be refused before the weights are read, is."""
    import torch

    from hf_paged_eviction.serving import UnsupportedTransformersError
    from hf_paged_eviction.serving.contract import check_transformers
    from hf_paged_eviction.serving.options import ServingOptions

    _ = options.key
    for path in options.contexts.values():
        if not Path(path).is_file():
            raise UserError(f"--context {path}: no such file")
    try:
        check_transformers()
        config, dtype = load_config(settings), resolve_dtype(settings)
        checked = ServingOptions(config, **options.batching_arguments)
        if isinstance(dtype, str):
            dtype = config.dtype or torch.get_default_dtype()
        checked.configure(_pool(options, checked, dtype), settings.device, dtype)
    except (UnsupportedTransformersError, TypeError, ValueError) as error:
        raise UserError(str(error)) from error


def _pool(options: ServeOptions, checked: ServingOptions, dtype: torch.dtype) -> Any:
    """The configuration of continuous batching."""
    from transformers import ContinuousBatchingConfig

    size = options.page_size or checked.page_size(dtype)
    settings = {"page_size": size, "num_blocks": options.pages, "max_batch_tokens": options.batch_tokens}
    return ContinuousBatchingConfig(**{name: value for name, value in settings.items() if value is not None})


def _bounded(stack: ExitStack, options: ServeOptions, model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """What is served, and the manager whose thread generates; both end with the stack."""
    from hf_paged_eviction.internals import shown_queries, trained_window
    from hf_paged_eviction.serving import paged_batching

    from .engine import Engine
    from .metrics import Meter
    from .prompt_logits import PromptLogits
    from .prompts import Limits, Prompts
    from .routes import Served
    from .sampling import Sampling
    from .stats import BatchingStats

    try:
        running = stack.enter_context(paged_batching(model, **options.batching_arguments))
        with shown_queries(model.config):
            contexts = {name: running.context(_load(path, model)) for name, path in options.contexts.items()}
        generation = _generation(model, tokenizer, options)
        manager = model.init_continuous_batching(generation, _pool(options, running.options, model.dtype))
        stack.enter_context(PromptLogits(manager))
        manager.warmup()
        manager.start()
    except (TypeError, ValueError, MemoryError) as error:
        raise UserError(str(error)) from error
    window = trained_window(model.config)
    prompt = options.max_prompt_tokens or (window - 1 if window else _LONGEST_PROMPT)
    limits = Limits(prompt, options.max_new_tokens, window)
    vocabulary = model.get_input_embeddings().num_embeddings
    engine = Engine(manager, Meter(partial(BatchingStats.of, manager)), options.max_queue)
    name = options.served_name or (Path(options.model).name if Path(options.model).exists() else options.model)
    ends = generation.eos_token_id
    served = Served(
        name,
        engine,
        Prompts(tokenizer, vocabulary, limits),
        Sampling.of(model.generation_config),
        frozenset(ends if isinstance(ends, list) else [ends]),
        contexts,
        options,
    )
    return served, manager


def _load(path: str, model: Any) -> Any:
    """A saved context.

    Raises:
        UserError: there is none, or it belongs to another model.
    """
    from hf_paged_eviction import PagedEvictionCache

    try:
        return PagedEvictionCache.load(path, model)
    except (OSError, ValueError) as error:
        raise UserError(f"--context {path}: {error}") from error


def _generation(model: Any, tokenizer: Any, options: ServeOptions) -> Any:
    """What all requests have in common: where answers end. How tokens are chosen, each says itself."""
    from transformers import GenerationConfig

    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return GenerationConfig(
        do_sample=False,
        eos_token_id=-1 if ends is None else ends,
        pad_token_id=0,
        max_new_tokens=options.max_new_tokens,
    )


def _announcement(served: Any, manager: Any, model: Any) -> list[str]:
    """What the log says at the start."""
    pool = manager.continuous_batching_config
    tokens = manager.options.page_tokens(pool.page_size, model.dtype)
    lines = [
        f"Serving {served.name}: at most {manager.options.budget} tokens per request and layer by "
        f"{manager.options.policy.label}, {pool.num_blocks} pages of {tokens} tokens; see /metrics"
    ]
    unread = {name for name in model.generation_config.to_diff_dict() if name not in _FOLLOWED and name[0] != "_"}
    if unread:
        lines.append(f"Of the model's generation_config this is not followed: {', '.join(sorted(unread))}")
    return lines


def _server(app: Any, engine: Any, options: ServeOptions) -> Any:
    import uvicorn

    from .patience import PatientProtocol

    class Server(uvicorn.Server):
        """A server with a grace period: on a stop signal it refuses new requests and finishes running ones for a
        while."""

        deadline: float | None = None
        #: Exit status of the process.
        status = 0

        async def on_tick(self, counter: int) -> bool:
            """Called several times a second; True ends the server."""
            if engine.dead and self.deadline is None:
                logging.getLogger("uvicorn.error").critical("Generation has stopped for all requests: the server ends.")
                self.status = 1
                self._begin_to_end()
                return True
            return bool(await super().on_tick(counter))

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """A signal came; the second one ends the process at once."""
            if self.should_exit:
                leave(128 + sig)
            self._begin_to_end()
            self.should_exit = True

        def _begin_to_end(self) -> None:
            engine.close()
            if self.deadline is None:
                seconds = options.grace + _AFTER_GRACE
                self.deadline = time.monotonic() + seconds
                # A forward, a tokenizer or a connection may still be running.
                self._last = threading.Timer(seconds, leave, (self.status,))
                self._last.daemon = True
                self._last.start()

        @property
        def seconds_left(self) -> float:
            """Until the process ends."""
            return _AFTER_GRACE if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

        def over(self) -> None:
            """Nothing goes on any more."""
            if self.deadline is not None:
                self._last.cancel()

        async def shutdown(self, sockets: Any = None) -> None:
            """Finish running requests within the grace period."""
            self._begin_to_end()
            late = asyncio.get_running_loop().call_later(options.grace, engine.end_all)
            await super().shutdown(sockets)
            late.cancel()

    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=PatientProtocol,
        timeout_graceful_shutdown=options.grace + _AFTER_GRACE / 2,  # type: ignore[arg-type]
        log_level="info",
        access_log=not options.quiet,
    )
    return Server(config)


__all__ = ["leave", "serve"]

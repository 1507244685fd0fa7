"""The server of transformers, whose model is bounded before it listens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from hf_paged_eviction.serving import BatchingStats, PagedBatching, paged_batching
from hf_paged_eviction.serving.contract import UnsupportedTransformersError, check_transformers

from ..errors import UserError
from ..models import source
from ..settings import EMBEDDED
from .guard import Guard
from .metrics import add_metrics

#: Options of `transformers serve` that would take requests past the bound.
_REFUSED = {
    "--compile": "compiled generation has a cache of its own, which nothing bounds",
    "--no-continuous-batching": "eviction works inside continuous batching",
    "--non-blocking": "the command waits until the server ends",
}
#: What we tell it in any case.
_OURS = ("--continuous-batching", "--non-blocking")
NEEDS = "fastapi, uvicorn and openai are needed: pip install 'hf_paged_eviction[eval,serve]'"


def serve(
    model: str,
    arguments: Sequence[str],
    most_new_tokens: int,
    ready: Callable[[Any], None] | None = None,
    **options: Any,
) -> None:
    """Serve until it is interrupted.

    Args:
        model: a folder or a name on the Hub.
        arguments: for `transformers serve`, as it spells them.
        most_new_tokens: most that a request may ask for.
        ready: called with the server just before it listens.
        options: of `paged_batching`, the model left out.

    Raises:
        UserError: something is missing or does not go together, with the way out.
    """
    _check(arguments)
    command = _bounded_command(model, most_new_tokens, ready, options)
    _parser(command)([source(model), *_precision(model, arguments), *_OURS])


def _precision(model: str, arguments: Sequence[str]) -> list[str]:
    """The embedded model's file is half precision to be small, not to be computed in."""
    given = any(argument.partition("=")[0] == "--dtype" for argument in arguments)
    return [*arguments] if given or model != EMBEDDED else [*arguments, "--dtype", "float32"]


def _check(arguments: Sequence[str]) -> None:
    for argument in arguments:
        reason = _REFUSED.get(argument.partition("=")[0])
        if reason is not None:
            raise UserError(f"{argument} does not go with eviction: {reason}")


def _parser(command: Any) -> Any:
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name="serve", help="Options of transformers serve.")(command)
    return app


def _bounded_command(
    name: str, most_new_tokens: int, ready: Callable[[Any], None] | None, options: dict[str, Any]
) -> type[Any]:
    """transformers' command, a class whose options are the arguments of its constructor."""
    try:
        check_transformers()
        from transformers.utils.import_utils import is_serve_available

        if not is_serve_available():
            raise UserError(NEEDS)
        from transformers.cli.serve import Serve
    except UnsupportedTransformersError as error:
        raise UserError(str(error)) from error
    except ImportError as error:
        raise UserError(f"{NEEDS} ({error})") from error

    class BoundedServe(Serve):  # type: ignore[misc]
        """Where the server would start in a thread of its own, the model is bounded and the server runs here."""

        def start_server(self) -> None:
            with ExitStack() as stack:
                guard = _bound(self, stack, name, most_new_tokens, options)
                stack.callback(self._generation_state.shutdown)
                if ready is not None:
                    ready(self)
                guard.announce()
                self.server.run()

    return BoundedServe


def _bound(served: Any, stack: ExitStack, called: str, most_new_tokens: int, options: dict[str, Any]) -> Guard:
    """Bound the loaded model, start its batching, and put a guard before every handler."""
    manager, state = served._model_manager, served._generation_state
    ((name, loaded),) = manager.loaded_models.items()
    model = loaded.model
    kind = manager.get_model_modality(model, processor=loaded.processor)
    if not state.use_continuous_batching(model, kind):
        raise UserError(
            f"transformers serves {type(model).__name__} without continuous batching, so nothing is bounded"
        )
    try:
        running = stack.enter_context(paged_batching(model, **options))
        if state._cb_config is not None:
            state._cb_config.allow_block_sharing = False
        batching = state.get_manager(name, use_cb=True)
        # At once, and with the model's own settings: otherwise those of the first request would hold for all.
        batching.init_cb(model, _settings(model))
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    guard = Guard(served, called, batching, most_new_tokens)
    add_metrics(served.server.config.app, running.stats)
    return guard


def _settings(model: Any) -> Any:
    from copy import deepcopy

    settings = deepcopy(model.generation_config)
    settings.use_cache = False  # continuous batching has its own
    return settings


__all__ = ["BatchingStats", "PagedBatching", "serve"]

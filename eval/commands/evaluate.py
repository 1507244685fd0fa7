"""`paged-eviction eval`."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import typer

from ..errors import UserError
from .errors import plain_errors
from .options import Options, changed, option_hints

EPILOG = """[bold]Examples[/]

A minute on two cores, without a download: seven simple policies on the small model that ships with the package

  paged-eviction eval

Some policies at some budgets, questions unknown when the context is compressed

  paged-eviction eval --policies paged_eviction,streaming_llm,full --budgets 256,25% --question-agnostic

LongBench as the papers report it: 16 tasks, files from the official data.zip

  paged-eviction eval --model meta-llama/Llama-3.1-8B-Instruct --tasks en16 --data-dir data.zip \
--policies paged_eviction,keydiff,full --budgets 512,1024 --output results/llama

The same over all GPUs of a machine; the same command continues a run that was stopped

  accelerate launch -m hf_paged_eviction_eval eval --config results/llama/run.yaml

A model that one GPU cannot hold

  torchrun --nproc-per-node 4 -m hf_paged_eviction_eval eval --tensor-parallel --model ... --tasks paper

The experiments of the PagedEviction paper, ten samples of each task

  paged-eviction eval --preset paper --limit 10

How well texts are predicted

  paged-eviction eval --text book.txt articles.jsonl --budgets 256,512,full
"""
#: Options that mean nothing with, or without, --text.
TASKS_ONLY = frozenset(
    "preset tasks seed data_dir question_aware max_length chat_template prefill_chunk_size share_prefill agreement "
    "edit_similarity rouge".split()
)
TEXTS_ONLY = frozenset({"chunk"})


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval", epilog=EPILOG)(evaluate)


def evaluate(**typed: Any) -> None:
    """Run every policy at every budget; print tables; write rows, settings, costs and plots.

    Rows are written as they are finished: a run that was stopped, by whatever, is continued by the same command.
    """
    with plain_errors():
        complete = run(Options(**typed))
    if not complete:
        raise typer.Exit(1)


def run(options: Options) -> bool:
    """Everything that was asked for; False if rows are missing."""
    from .. import requests, terminal

    if options.text:
        if wrong := changed(options, TASKS_ONLY):
            raise UserError(f"{', '.join(wrong)}: about tasks, leave it out with --text")
        return terminal.run_texts(requests.text_request(options), options.workers)
    if options.files:
        raise UserError(f"to read files, say --text: paged-eviction eval --text {options.files[0]}")
    if wrong := changed(options, TEXTS_ONLY):
        raise UserError(f"{', '.join(wrong)}: about texts, say --text")
    return terminal.run_tasks(requests.task_requests(options), options.workers)


def _signature() -> inspect.Signature:
    hints = option_hints()
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(each.name, keyword, default=each.default, annotation=hints[each.name])
            for each in fields(Options)
        ]
    )


# The options are written down once, as fields: the command line reads them here.
evaluate.__signature__ = _signature()  # type: ignore[attr-defined]
evaluate.__annotations__ = option_hints()

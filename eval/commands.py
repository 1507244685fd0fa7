"""The commands of `paged-eviction`; needs the extra `eval`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import hf_paged_eviction

from .errors import UserError

EPILOG = """Examples:

  paged-eviction eval

  paged-eviction eval --policies paged_eviction,streaming_llm --budgets 256,25%,full --samples 64

  paged-eviction eval --model path/to/model --device cuda --dtype bfloat16 --length 8192 --output results/mine

  paged-eviction eval --text book.txt articles.jsonl --budgets 256,512,full
"""
DEFAULT_BUDGETS = "6%,12.5%,25%,50%,full"
FULL_LENGTHS, FULL_SAMPLES = "512,1024,2048", 128

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


class Heads(str, Enum):
    """Who decides what is evicted."""

    shared = "shared"
    separate = "separate"


class Dtype(str, Enum):
    """Precision of the model."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@contextmanager
def plain_errors() -> Iterator[None]:
    """Show a mistake of the user as one message, exit status 2."""
    try:
        yield
    except UserError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues where it was", err=True)
        raise typer.Exit(130) from None


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(hf_paged_eviction.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """What does a smaller KV cache cost? Accuracy and perplexity of eviction policies at any budget."""


@app.command("policies")
def policies() -> None:
    """List the eviction policies, their papers, and what they keep."""
    from .catalogue import policy_table

    Console().print(policy_table())


@app.command("tasks")
def tasks() -> None:
    """List the tasks."""
    from .catalogue import task_table

    Console().print(task_table())


@app.command("eval", epilog=EPILOG)
def evaluate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="With --text: plain texts, or .jsonl with a field context or text."),
    ] = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text",
            help="Measure perplexity by position on FILE... instead of accuracy on tasks; "
            "without files, on standard-library modules that the embedded model never saw.",
        ),
    ] = False,
    model: Annotated[str, typer.Option(help="A folder or a name on the Hugging Face Hub.")] = "embedded",
    tokenizer: Annotated[str | None, typer.Option(help="If it is not the model's own.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: float32 on a CPU, else the checkpoint's.")] = Dtype.auto,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, ...")] = "cpu",
    policies: Annotated[str | None, typer.Option(help="Comma-separated; all if not given.")] = None,
    budgets: Annotated[
        str, typer.Option(help="Comma-separated: tokens, shares of the length, full.")
    ] = DEFAULT_BUDGETS,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    heads: Annotated[
        Heads, typer.Option(help="One decision for all KV heads of a layer, or one for each.")
    ] = Heads.shared,
    task_names: Annotated[str | None, typer.Option("--tasks", help="Comma-separated; all if not given.")] = None,
    length: Annotated[
        str | None,
        typer.Option(
            help="Tokens per prompt, comma-separated for several (default 1024); with --text: per text (2048)."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Questions per task and length (default 64); with --text: texts (8).")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help=f"Tasks at {FULL_LENGTHS} tokens, {FULL_SAMPLES} questions each.")
    ] = False,
    question_aware: Annotated[
        bool,
        typer.Option(
            "--question-aware/--question-agnostic",
            help="Compress after the model has read the question, or before it.",
        ),
    ] = False,
    chunk: Annotated[int, typer.Option(min=1, help="With --text: tokens per forward.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts, or texts, that run together.")] = 16,
    seed: Annotated[int, typer.Option(help="Which questions are drawn.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes (default 2 for the embedded model on a CPU, else 1).")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of results (default results/eval, results/text); a stopped run continues."),
    ] = None,
) -> None:
    """Run every policy at every budget, print tables, write JSON and plots.

    Without options: all policies and tasks on the embedded model, minutes on two cores.
    """
    with plain_errors():
        from . import requests, terminal

        shared = requests.Shared(
            model=model,
            tokenizer=tokenizer,
            dtype=dtype.value,
            device=device,
            policies=policies,
            budgets=budgets,
            block_size=block_size,
            heads=heads.value,
            batch_size=batch_size,
        )
        if text:
            if full or task_names or question_aware:
                raise UserError("--full, --tasks and --question-aware are about tasks: leave them out with --text")
            text_settings = requests.text_settings(shared, files or [], length, samples, chunk)
            terminal.run_texts(text_settings, output or Path("results/text"), workers)
        else:
            if files:
                raise UserError(f"to read files, say --text: paged-eviction eval --text {files[0]}")
            if full and (length or samples):
                raise UserError("--full chooses lengths and samples: give it alone, or --length and --samples")
            length, samples = (FULL_LENGTHS, FULL_SAMPLES) if full else (length, samples)
            settings = requests.task_settings(shared, task_names, length, samples, seed, question_aware)
            terminal.run_tasks(settings, output or Path("results/eval"), workers)

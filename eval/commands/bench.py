"""`paged-eviction bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import plain_errors
from .options import AllowPickle, Dtype, TrustRemoteCode

WHAT, CACHES, HOW, ANSWERS, RUN = "What is measured", "Caches", "How", "Whole answers (throughput)", "The run"

EPILOG = """[bold]What is compared[/], all in the same rounds; C is the budget

  full: DynamicCache of the whole context

  floor: DynamicCache of C tokens, the least that a cache of this size can cost

  paged: PagedEvictionCache(budget=C)

  kvpress: kvpress with key norms, back to C tokens once per block; where it is installed

  full_compiled: StaticCache of the whole context, the forward compiled

  floor_compiled: StaticCache of C tokens, compiled the same way

  paged_static: PagedEvictionCache(budget=C, static=True), compiled the same way

  paged_static_own: the same with the attention implementation paged_eviction, which needs no mask

[bold]What the columns say[/]

ms: the median over rounds of the time of one step: inputs prepared, forward, next token, as generate does it; spread \
is that of all rounds. Ratios are medians of ratios within a round. Contexts are random keys and values: the time does \
not depend on them.

limit: the time that reading the weights and the held keys and values once would take at the bandwidth of a large \
copy, measured in the same run, as a share of the step. A step that mostly reads can pass 100 %.

KV held, peak: bytes of keys and values; these, the weights, and what decoding allocates on top of them.

cache, eviction: shares of the step inside cache.update, and in choosing victims (scores, ranking). By a clock around \
these calls in a run apart from the timings; inside a compiled step there is no clock.

[bold]Examples[/]

Two contexts on the CPU with a model of 100 M random parameters

  paged-eviction bench --variants floor,full,paged

A published shape with random weights, nothing downloaded, and the largest batches that fit

  paged-eviction bench --model llama-3.1-8b --contexts 8192,32768 --budgets 1024,4096 --batch-sizes 1,8 --largest-batch

The throughput test of the PagedEviction paper, and a small version of it

  paged-eviction bench --preset paper-throughput

  paged-eviction bench --preset paper-throughput --model 100m --requests 2 --input-tokens 64 --output-tokens 128 \
--budgets 64

The goals of the project, each with a verdict: on any CPU, on one H200

  paged-eviction bench --preset cpu --threads 1

  paged-eviction bench --preset h200

Where the time goes

  paged-eviction bench --contexts 8192 --variants paged,floor --profile trace.json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench", epilog=EPILOG)(bench)


def bench(
    preset: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=WHAT,
            help="cpu or h200: the goals of the project on such a machine. paper-throughput: 1,024 tokens in, 8,192 "
            "out, 64 requests, budget 1,024. Other options replace parts of it.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=WHAT,
            help="100m, llama-3.2-1b, llama-3.2-3b, llama-3.1-8b: that shape with random weights, made on the device. "
            "Or embedded, a folder, a name on the Hugging Face Hub.",
            show_default="100m",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            rich_help_panel=WHAT,
            help="Tokens seen before the first step. Below the budget nothing is evicted.",
            show_default="2048,8192",
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(metavar="N,...", rich_help_panel=WHAT, help="Tokens held per layer and row.", show_default="1024"),
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(metavar="N,...", rich_help_panel=WHAT, help="Rows.", show_default="1")
    ] = None,
    largest_batch: Annotated[
        bool,
        typer.Option(
            "--largest-batch",
            rich_help_panel=WHAT,
            help="Also find the largest batch that holds its context and decodes, by doubling and bisecting. CUDA "
            "only: a CPU swaps or kills instead of saying no.",
        ),
    ] = False,
    variants: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", rich_help_panel=CACHES, help="From the list below.", show_default="all"),
    ] = None,
    policy: Annotated[
        str, typer.Option(rich_help_panel=CACHES, help="Of this cache; one that does not decide by attention.")
    ] = "paged_eviction",
    block_size: Annotated[int, typer.Option(min=1, rich_help_panel=CACHES, help="Tokens per block.")] = 16,
    steps: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=HOW, help="Decoded tokens per timing: whole blocks.", show_default="32"),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, rich_help_panel=HOW, help="Timings.", show_default="9")] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(rich_help_panel=HOW, help="auto: float32 on a CPU; else bfloat16, or what the checkpoint has."),
    ] = Dtype.auto,
    device: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=HOW,
            help="cpu, cuda, cuda:1, ... The accelerator if there is one; the CPU for the small models.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=HOW, help="Of torch on a CPU.", show_default="torch decides")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=ANSWERS, help="Prompts.", show_default="64")
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=ANSWERS, help="Per prompt.", show_default="1024")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=ANSWERS, help="Per answer.", show_default="8192")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=ANSWERS,
            help="Requests that run together.",
            show_default="all; on CUDA as many as fit, for each variant",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=RUN,
            help="Write a trace of some steps of every variant, for chrome://tracing; first budget and batch size.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=RUN,
            help="Folder of results. A run that was stopped is continued by the same command.",
            show_default="results/bench, with a preset results/bench_PRESET",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", rich_help_panel=RUN, help="Measure anew what is in the folder already.")
    ] = False,
) -> None:
    """Time and memory of a decoded token: this cache beside others, whatever the context.

    Exit status 1 if something that was asked for could not be measured.
    """
    with plain_errors():
        from ..bench.request import Typed, read, run

        complete = run(
            read(
                Typed(
                    preset=preset,
                    model=model,
                    trust_remote_code=trust_remote_code,
                    allow_pickle=allow_pickle,
                    contexts=contexts,
                    budgets=budgets,
                    batch_sizes=batch_sizes,
                    largest_batch=largest_batch,
                    variants=variants,
                    policy=policy,
                    block_size=block_size,
                    steps=steps,
                    rounds=rounds,
                    dtype=dtype.value,
                    device=device,
                    threads=threads,
                    requests=requests,
                    input_tokens=input_tokens,
                    output_tokens=output_tokens,
                    batch_size=batch_size,
                )
            ),
            output or Path("results") / (f"bench_{preset}" if preset else "bench"),
            again,
            profile,
        )
    if not complete:
        raise typer.Exit(1)

"""`paged-eviction bench`."""

from __future__ import annotations

from pathlib import Path

from ..options.bench import BenchOptions

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

The throughput and latency figures of the PagedEviction paper: budgets 256 to 4,096, blocks of 8, 16 and 32 beside \
baselines that evict token by token, for the shapes of three Llama models; and a small version for a CPU

  paged-eviction bench --preset paper

  paged-eviction bench --preset paper --model 100m --requests 2 --input-tokens 64 --output-tokens 128 \
--budgets 96,128

Continuous batching with a fixed pool of pages, with budgets and without: requests and tokens per second, live \
requests, preemptions, time to the first token

  paged-eviction bench --preset serving --threads 1

A decoded token at 8, 4, 3 and 2 bits, at the same tokens and in the same bytes, eager and compiled

  paged-eviction bench --preset bits --threads 1

The time to the first token of prompts of 2k to 64k tokens: full and bounded, chunk sizes, policies

  paged-eviction bench --preset prefill --threads 1

Where the time goes

  paged-eviction bench --contexts 8192 --variants paged,floor --profile trace.json
"""


def bench(options: BenchOptions) -> bool:
    """Time and memory of a decoded token: this cache beside others, whatever the context.

    Exit status 1 if something that was asked for could not be measured.
    """
    output = options.output or Path("results") / (f"bench_{options.preset}" if options.preset else "bench")
    if options.preset == "serving":
        from ..bench.serving.preset import run as run_preset

        return run_preset(options, output)
    if options.preset == "bits":
        from ..bench.steps.precision import run as run_precisions

        return run_precisions(options, output)
    if options.preset == "prefill":
        from ..bench.prefill.run import run as run_prefill

        return run_prefill(options, output)
    from ..bench.request import read, run, run_paper

    if options.preset == "paper":
        return run_paper(options, output)
    return run(read(options), output, options.again, options.profile)

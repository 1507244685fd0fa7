"""`paged-eviction bench`."""

from __future__ import annotations

from ..options.bench import BenchOptions

EPILOG = """[bold]What is compared[/], all in the same rounds; C is the budget

  full: DynamicCache of the whole context

  floor: DynamicCache of C tokens, the least that a cache of this size can cost

  paged: PagedEvictionCache(budget=C)

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

KV held, peak: bytes of keys and values; these, the weights, and what decoding allocates on top of them (CUDA only).

cache, eviction: shares of the step inside cache.update, and in choosing victims (scores, ranking). Measured by a \
clock around these calls, in a separate run; not inside compiled steps.

[bold]Examples[/]

Two contexts on the CPU with a model of 100 M random parameters

  paged-eviction bench --variants floor,full,paged

A published shape with random weights, nothing downloaded

  paged-eviction bench --model llama-3.1-8b --contexts 8192,32768 --budgets 1024,4096 --batch-sizes 1,8
"""
#: What `--help` says.
BRIEF = {
    "model": "a folder, a name on the Hub, or random weights of a size: 100m, 1b, 8b",
    "contexts": "tokens seen before the first step (2048,8192)",
    "budgets": "tokens that are held (1024)",
    "batch_sizes": "rows",
    "variants": "what is compared, full, floor, paged, paged_static, ...: see --help-all",
    "policy": "eviction policy",
    "device": "cpu, cuda, cuda:1, ...",
    "output": "folder of results; what it has is not measured again",
}


def bench(options: BenchOptions) -> bool:
    """Measure the time and memory of a decoded token, with this cache and with others.

    Exit status 1 if something that was asked for could not be measured.
    """
    from ..bench.run import run_options

    return run_options(options)

"""`paged-eviction bench`."""

from __future__ import annotations

from ..options.bench import BenchOptions


def bench(options: BenchOptions) -> bool:
    """Measure the time and memory of a decoded token, with this cache and with others.

    Exit status 1 if something that was asked for could not be measured.

    Variants, all in the same rounds; C is the budget:
      full              DynamicCache of the whole context
      floor             DynamicCache of C tokens, the least that these can cost
      paged             PagedEvictionCache(budget=C)
      full_compiled     StaticCache of the whole context, the forward compiled
      floor_compiled    StaticCache of C tokens, compiled the same way
      paged_static      PagedEvictionCache(budget=C, static=True), compiled, too
      paged_static_own  the same with attention paged_eviction, which needs no mask

    ms is the median time of one step (inputs prepared, forward, next token, as generate does it), with its spread over
    rounds. Ratios are medians of ratios within a round. Contexts are random keys and values: the time does not depend
    on them. limit is the time to read the weights and the held keys and values once at the bandwidth of a large copy,
    as a share of the step. A step that mostly reads can pass 100 %. peak is the bytes of keys and values, of weights,
    and of what decoding allocates on top (CUDA only). cache and eviction are shares of the step inside cache.update,
    and in choosing victims, by a clock around these calls in a separate run; not inside compiled steps.

    Examples:
      # Two contexts on the CPU with a model of 100 M random parameters
      paged-eviction bench --variants floor,full,paged

      # A published shape with random weights, nothing downloaded
      paged-eviction bench --model llama-3.1-8b --contexts 8192,32768 --budgets 1024,4096 --batch-sizes 1,8
    """
    from ..bench.run import run_options

    return run_options(options)

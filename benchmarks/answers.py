"""Whole answers through `generate`, prompts included: tokens per second, as in the figures of the PagedEviction paper
(arXiv 2509.04377): `python benchmarks/answers.py --device cuda`.

Its baselines evict one token after the other while decoding; PagedEviction evicts a block when the newest is full. What
the paper measured is what users of vLLM saw; here all of them run in transformers, on the same storage.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from common import RESULTS, measured
from transformers import DynamicCache, StaticCache

from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval.bench.decoder import room_for_graphs
from hf_paged_eviction_eval.bench.settings import BenchSettings
from hf_paged_eviction_eval.bench.shapes import make_model
from hf_paged_eviction_eval.bench.variants import (
    FULL,
    FULL_COMPILED,
    PAGED_STATIC_OWN,
    STATIC,
    own_attention,
    paged_cache,
)
from hf_paged_eviction_eval.models.device import is_out_of_memory
from hf_paged_eviction_eval.options.model import Loading
from hf_paged_eviction_eval.running.efficiency import Stopwatch
from hf_paged_eviction_eval.running.memory import free_memory

_TOKEN_BY_TOKEN = {"block_size": 1, "recent_tokens": None}
#: Options of the caches of the paper, by the name of the variant.
METHODS: dict[str, dict[str, Any]] = {
    **{f"paged_{size}": {"policy": "paged_eviction", "block_size": size} for size in (8, 16, 32)},
    "streaming_llm": {"policy": "streaming_llm", **_TOKEN_BY_TOKEN, "sink_tokens": 4},
    "keydiff": {"policy": "keydiff", **_TOKEN_BY_TOKEN},
    "key_norm": {"policy": "key_norm", **_TOKEN_BY_TOKEN},
}
VARIANTS = (FULL, FULL_COMPILED, *STATIC, *METHODS)


def measure(model: Any, options: argparse.Namespace, key: dict[str, Any]) -> dict[str, Any]:
    """One variant answers all requests, as many together as fit: half as many where memory runs out."""
    size = min(options.batch_size or options.requests, options.requests)
    while True:
        try:
            with own_attention(model) if key["variant"] == PAGED_STATIC_OWN else nullcontext(), room_for_graphs():
                seconds = answer_all(model, options, key, size)
            break
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or size == 1 or options.batch_size is not None:
                raise
        size //= 2
        free_memory()
    rate = options.requests * options.output_tokens / seconds
    return {"rows_together": size, "seconds": seconds, "tokens_per_second": rate}


def answer_all(model: Any, options: argparse.Namespace, key: dict[str, Any], size: int) -> float:
    """Seconds for all requests, so many rows at a time, after 20 tokens that choose kernels and make graphs."""
    vocabulary, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocabulary, (options.requests, options.input_tokens), generator=generator)
    batches, caches = prompts.to(model.device).split(size), dict[int, Any]()
    _answer(model, _cache(model, options, key, size, caches), batches[0], min(20, options.output_tokens))
    watch = Stopwatch(model.device)
    for batch in batches:
        _answer(model, _cache(model, options, key, len(batch), caches), batch, options.output_tokens)
    return watch.lap()


@torch.no_grad()
def _answer(model: Any, cache: Any, prompts: torch.Tensor, count: int) -> None:
    """`count` tokens, no fewer: a random model may say the end-of-text token at any time."""
    settings = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompts)
    model.generate(prompts, attention_mask=mask, stop_strings=None, **{CACHE_ARGUMENT: cache}, **settings)


def _cache(model: Any, options: argparse.Namespace, key: dict[str, Any], rows: int, kept: dict[int, Any]) -> Any:
    """An empty cache; those of static shape are kept, emptied and used again, as their graphs belong to them."""
    name, budget = key["variant"], key["budget"]
    if name == FULL:
        return DynamicCache(config=model.config)
    if rows in kept:
        kept[rows].reset()
    elif budget is None:
        kept[rows] = StaticCache(config=model.config, max_cache_len=options.input_tokens + options.output_tokens)
    else:
        settings = BenchSettings(**METHODS.get(name, {}))
        kept[rows] = paged_cache(model, settings, budget, name in STATIC, rows, options.input_tokens)
    return kept[rows]


def main() -> int:
    """0 if everything was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a shape of `paged-eviction bench`, or a model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[FULL, *METHODS])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, help="requests that run together; default: as many as fit")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", default=str(RESULTS / "answers"))
    options = parser.parse_args()

    @cache
    def model() -> Any:
        return make_model(Loading(model=options.model, device=options.device))

    whole = (FULL, FULL_COMPILED)
    sizes = [(name, size) for name in options.variants for size in ((None,) if name in whole else options.budgets)]
    keys = [{"variant": name, "budget": size} for name, size in sizes]
    return 0 if measured(options, keys, lambda key: measure(model(), options, key)) else 1


if __name__ == "__main__":
    sys.exit(main())

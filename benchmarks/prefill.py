"""The time to the first token over the length of the prompt: `python benchmarks/prefill.py --threads 1`.

`DynamicCache` reads a prompt in one forward, or in the same chunks as this cache; a chunk then attends to all that was
read, so that time grows with the square of the length. A bounded cache attends to its budget and the chunk: time grows
with the length. Ids are random and so are the weights of a shape: time does not depend on them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from statistics import median
from typing import Any

import torch
from common import RESULTS, measured
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.integration.feeding import feed
from hf_paged_eviction_eval.bench.shapes import make_model
from hf_paged_eviction_eval.bench.variants import FULL, own_attention
from hf_paged_eviction_eval.options.model import Loading
from hf_paged_eviction_eval.running.efficiency import Stopwatch

#: Up to this length chunk sizes and policies are compared.
COMPARED = 16384
CHUNK, CHUNKS, POLICIES = 512, (128, 256, 512, 1024, 2048), ("paged_eviction", "keydiff", "snapkv", "h2o")
Case = dict[str, Any]
"""Tokens (`context`), `cache` (full, or a policy) and tokens per forward (`chunk`; None = one forward)."""


def cases(lengths: list[int]) -> Iterator[Case]:
    """What is read, the shortest prompts first."""
    first, *others = POLICIES
    for length in sorted(lengths):
        ways: list[tuple[str, int | None]] = [(FULL, None), (FULL, CHUNK), (first, CHUNK)]
        if length <= COMPARED:
            ways += [(first, chunk) for chunk in CHUNKS if chunk != CHUNK] + [(policy, CHUNK) for policy in others]
        yield from ({"context": length, "cache": name, "chunk": chunk} for name, chunk in ways)


@torch.inference_mode()
def read_prompt(model: Any, case: Case, budget: int) -> tuple[float, DynamicCache]:
    """Read a prompt of random ids up to the first token of the answer: seconds, and the cache."""
    length, policy = case["context"], case["cache"]
    needs = policy != FULL and make_policy(policy).needs.queries
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=model.device)
    with own_attention(model) if needs else nullcontext():
        cache = DynamicCache(config=model.config)
        if policy != FULL:
            cache = PagedEvictionCache(model.config, budget=budget, policy=policy)
        watch = Stopwatch(model.device)
        for part in torch.arange(length, device=model.device)[None].split(case["chunk"] or length, dim=1):
            logits = feed(model, ids[:, part[0]], None, cache, positions=part)
        logits[:, -1].argmax(-1)
        return watch.lap(), cache


def main() -> int:
    """0 if everything was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="prefill", help="a shape of `paged-eviction bench`, or a model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--budgets", type=int, nargs=1, default=[1024])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", default=str(RESULTS / "prefill"))
    options = parser.parse_args()

    @cache
    def warm_model() -> Any:
        model = make_model(Loading(model=options.model, device=options.device))
        read_prompt(model, {"context": 1024, "cache": FULL, "chunk": None}, options.budgets[0])  # kernels are chosen
        return model

    def measure(case: Case) -> dict[str, Any]:
        rounds = 3 if case["context"] <= 8192 else 1
        times = [read_prompt(warm_model(), case, options.budgets[0])[0] for _ in range(rounds)]
        return {"seconds": round(median(times), 4)}

    return 0 if measured(options, cases(options.contexts), measure) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Time of one layer's `update` for one decoded token, for every policy: `python benchmarks/update.py --help`.

Averaged over whole blocks, so that the choice of a victim counts, next to transformers' DynamicCache, which copies
everything that it holds.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from common import save
from transformers import DynamicCache, LlamaConfig

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import reads_profile
from hf_paged_eviction.policies import available_policies, make_policy
from hf_paged_eviction_eval.bench.rows import interleaved, ratio
from hf_paged_eviction_eval.bench.variants import FULL
from hf_paged_eviction_eval.running.efficiency import Stopwatch

#: As in Llama-3.1-8B.
HEADS, WIDTH = 8, 128
BUDGET, CONTEXT = 2048, 4096
#: Updates in a row: enough that the processor's caches, full of the other's data at first, matter little.
STEPS = 64


def time_updates(policies: Sequence[str], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds per token and round under each policy and, as `FULL`, in a DynamicCache.

    Interleaved, over whole blocks, the choice of victims included; float32, one row.
    """
    config = LlamaConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, num_hidden_layers=1
    )
    mask = torch.ones(1, CONTEXT, dtype=torch.long)
    caches: dict[str, Any] = {
        policy: PagedEvictionCache(config, budget=BUDGET, policy=policy, attention_mask=mask) for policy in policies
    }
    runs = {name: _updates(cache, device) for name, cache in {**caches, FULL: DynamicCache(config=config)}.items()}
    for run in runs.values():
        run()
    return interleaved(runs, rounds)


def _updates(cache: Any, device: torch.device) -> Callable[[], float]:
    states = torch.randn(2, 1, HEADS, CONTEXT, WIDTH, device=device)
    cache.update(states[0], states[1], 0)
    token = torch.randn(1, HEADS, 1, WIDTH, device=device)

    def run() -> float:
        if type(cache) is DynamicCache and (grown := cache.get_seq_length() - CONTEXT):
            cache.crop(-grown)
        watch = Stopwatch(device)
        for _ in range(STEPS):
            cache.update(token, token, 0)
        return watch.lap() / STEPS

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    policies = [name for name in available_policies() if not (make_policy(name).needs.queries or reads_profile(name))]
    times = time_updates(policies, torch.device("cpu"), options.rounds)
    update_us = {name: 1e6 * median(values) for name, values in times.items()}
    speedup = {name: ratio(times[FULL], times[name]) for name in policies}
    for name, value in update_us.items():
        faster = f"   {FULL} takes {speedup[name]:.1f} times as long" if name in speedup else ""
        print(f"{name:20s} {value:10.1f} us per token{faster}")
    settings = {**vars(options), "budget": BUDGET, "context": CONTEXT}
    save("update", {"settings": settings, "update_us": update_us, f"{FULL} / x": speedup})


if __name__ == "__main__":
    main()

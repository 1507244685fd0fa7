"""Time of one layer's `update` for one decoded token, for every policy: `python benchmarks/update.py --help`.

What `paged-eviction bench` measures for one policy: averaged over whole blocks, so that the choice of a victim counts,
next to transformers' DynamicCache, which copies everything that it holds.
"""

import argparse
from statistics import median

import torch
from common import ratio, save

from hf_paged_eviction.policies import available_policies, make_policy
from hf_paged_eviction_eval.bench.steps.update import BUDGET, CONTEXT, time_updates
from hf_paged_eviction_eval.bench.variants import FULL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    policies = [name for name in available_policies() if not make_policy(name).needs.queries]
    times = time_updates(policies, torch.device("cpu"), options.rounds)
    update_us = {name: 1e6 * median(values) for name, values in times.items()}
    speedup = {name: ratio(times, FULL, name) for name in policies}
    for name, value in update_us.items():
        faster = f"   {FULL} takes {speedup[name]:.1f} times as long" if name in speedup else ""
        print(f"{name:20s} {value:10.1f} us per token{faster}")
    settings = {**vars(options), "budget": BUDGET, "context": CONTEXT}
    save("update", {"settings": settings, "update_us": update_us, f"{FULL} / x": speedup})


if __name__ == "__main__":
    main()

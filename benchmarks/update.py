"""Time of one layer's `update` for one decoded token: `python benchmarks/update.py --help`.

PagedLayer (averaged over whole blocks, so the choice of a victim counts) next to transformers' DynamicLayer, which
copies everything it holds. 1 row, 8 KV heads, head size 128, as in Llama-3.1-8B.
"""

import argparse
from statistics import median

import torch
from common import interleaved, ratio, save
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction.policies import available_policies, make_policy
from hf_paged_eviction.table.budget import BlockBudget

HEADS, WIDTH = 8, 128


class Updater:
    """Feeds `steps` tokens to a layer that has seen `context` of them."""

    def __init__(self, layer: CacheLayerMixin, context: int, steps: int) -> None:
        self.layer, self.context, self.steps = layer, context, steps
        self.token = torch.randn(1, HEADS, 1, WIDTH)
        layer.update(torch.randn(1, HEADS, context, WIDTH), torch.randn(1, HEADS, context, WIDTH))

    def __call__(self) -> None:
        if isinstance(self.layer, DynamicLayer):
            self.layer.crop(self.context - self.layer.get_seq_length())
        for _ in range(self.steps):
            self.layer.update(self.token, self.token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    sizes = BlockBudget.validate(options.budget, None, 16, None, 0)
    runs = {
        f"DynamicLayer {size}": Updater(DynamicLayer(), size, options.steps)
        for size in (options.budget, options.context)
    }
    for policy in (name for name in available_policies() if not make_policy(name).needs.queries):
        runs[policy] = Updater(PagedLayer(sizes, make_policy(policy)), options.context, options.steps)
    times = interleaved(runs, options.rounds)
    update_us = {name: 1e6 * median(values) / options.steps for name, values in times.items()}
    full = f"DynamicLayer {options.context}"
    speedup = {name: ratio(times, full, name) for name in runs if name != full}
    for name, value in update_us.items():
        faster = f"   {full} takes {speedup[name]:.1f} times as long" if name in speedup else ""
        print(f"{name:20s} {value:10.1f} us per token{faster}")
    save("update", {"settings": vars(options), "update_us": update_us, f"{full} / x": speedup})


if __name__ == "__main__":
    main()

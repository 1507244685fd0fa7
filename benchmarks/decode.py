"""Time of a decode step, as ratios of one run: `python benchmarks/decode.py --help`.

Compares, interleaved, one decoded token with

* `full 2k` / `full 8k`: DynamicCache that holds everything,
* `floor`: DynamicCache that holds no more than the budget, the least a cache of this size can cost,
* `paged 2k` / `paged 8k`: PagedEvictionCache after 2k and 8k tokens of context.

The contexts are random keys and values: a step's time does not depend on them.
"""

import argparse
from statistics import median
from typing import Any

import torch
from common import benchmark_config, fill, interleaved, ratio, save
from transformers import AutoModelForCausalLM, DynamicCache

from hf_paged_eviction import PagedEvictionCache


class Decoder:
    """Decodes `steps` tokens; a growing cache is cropped back afterwards, outside the next timing of itself."""

    def __init__(self, model: Any, cache: Any, steps: int) -> None:
        self.model, self.cache, self.steps = model, cache, steps
        self.token = torch.tensor([[7]])

    @torch.no_grad()
    def __call__(self) -> None:
        if isinstance(self.cache, DynamicCache) and not isinstance(self.cache, PagedEvictionCache):
            grown = self.cache.get_seq_length() - self.start
            if grown:
                self.cache.crop(-grown)
        for _ in range(self.steps):
            self.model(self.token, past_key_values=self.cache)

    def started(self) -> "Decoder":
        self.start = self.cache.get_seq_length()
        return self


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--policy", default="paged_eviction")
    parser.add_argument("--steps", type=int, default=32, help="decoded tokens per timing (two blocks)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = benchmark_config()
    model = AutoModelForCausalLM.from_config(config).eval()

    def decoder(cache: Any, context: int) -> Decoder:
        fill(cache, config, context)
        return Decoder(model, cache, options.steps).started()

    def paged() -> PagedEvictionCache:
        return PagedEvictionCache(config, budget=options.budget, policy=options.policy)

    times = interleaved(
        {
            "floor": decoder(DynamicCache(config=config), options.budget - options.steps // 2),
            "paged 2k": decoder(paged(), 2048),
            "paged 8k": decoder(paged(), 8192),
            "full 2k": decoder(DynamicCache(config=config), 2048),
            "full 8k": decoder(DynamicCache(config=config), 8192),
        },
        options.rounds,
    )
    ratios = {
        "paged 8k / floor": ratio(times, "paged 8k", "floor"),
        "paged 8k / paged 2k": ratio(times, "paged 8k", "paged 2k"),
        "full 2k / paged 2k": ratio(times, "full 2k", "paged 2k"),
        "full 8k / paged 8k": ratio(times, "full 8k", "paged 8k"),
    }
    step_ms = {name: 1000 * median(values) / options.steps for name, values in times.items()}
    for name, value in step_ms.items():
        print(f"{name:10s} {value:8.2f} ms per token")
    for name, value in ratios.items():
        print(f"{name:20s} {value:6.3f}")
    parameters = sum(weight.numel() for weight in model.parameters())
    save("decode", {"settings": vars(options), "parameters": parameters, "step_ms": step_ms, "ratios": ratios})


if __name__ == "__main__":
    main()

"""What policies that decide by attention cost beside one that reads keys and values only.

`python benchmarks/observe.py --help`. Compares, interleaved, decoded tokens of the same model at the same budget, all
in the attention implementation "paged_eviction": the policy `paged_eviction` is the reference, the ratios are the
others' step times to its own. Memory is what a layer keeps beside keys and values: statistics per token, and the
queries of one block.
"""

import argparse
from statistics import median
from typing import Any

import torch
from common import benchmark_config, interleaved, ratio, save
from transformers import AutoModelForCausalLM

from hf_paged_eviction import PagedEvictionCache

REFERENCE = "paged_eviction"
POLICIES = ("h2o", "snapkv", "tova", "roco", "caote(h2o)")
BLOCK_SIZE = 16


class Decoder:
    """Decodes `steps` tokens after a prompt, with one policy."""

    def __init__(self, model: Any, policy: str, budget: int, context: int, steps: int) -> None:
        self.model, self.steps = model, steps
        self.cache = PagedEvictionCache(model.config, budget=budget, block_size=BLOCK_SIZE, policy=policy)
        self.token = torch.tensor([[7]])
        with torch.no_grad():
            ids = torch.randint(0, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
            for chunk in ids.split(512, dim=1):
                model(chunk, past_key_values=self.cache, logits_to_keep=1)

    @torch.no_grad()
    def __call__(self) -> None:
        for _ in range(self.steps):
            self.model(self.token, past_key_values=self.cache)

    @torch.no_grad()
    def extra_memory(self) -> float:
        """Bytes of statistics and queries as a share of those of keys and values, just before a block is full."""
        while self.cache.get_seq_length() % BLOCK_SIZE != BLOCK_SIZE - 1:
            self.model(self.token, past_key_values=self.cache)
        layers = [layer for _, layer in self.cache.paged_layers]
        return sum(layer.listener.observer.bytes for layer in layers if layer.listener) / sum(
            one.storage_bytes for one in layers
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--context", type=int, default=2560)
    parser.add_argument("--policies", default=",".join(POLICIES), help="separated by commas outside of brackets")
    parser.add_argument("--steps", type=int, default=32, help="decoded tokens per timing (two blocks)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = benchmark_config()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="paged_eviction").eval()
    decoders = {
        policy: Decoder(model, policy, options.budget, options.context, options.steps)
        for policy in (REFERENCE, *options.policies.split(","))
    }
    times = interleaved(dict(decoders), options.rounds)
    rows = {
        policy: {
            "step_ms": 1000 * median(times[policy]) / options.steps,
            "ratio": ratio(times, policy, REFERENCE),
            "extra_memory": decoder.extra_memory(),
        }
        for policy, decoder in decoders.items()
    }
    for policy, row in rows.items():
        print(f"{policy:16s} {row['step_ms']:8.2f} ms  x {row['ratio']:.3f}  memory + {row['extra_memory']:.2%}")
    parameters = sum(weight.numel() for weight in model.parameters())
    save("observe", {"settings": vars(options), "parameters": parameters, "rows": rows})


if __name__ == "__main__":
    main()

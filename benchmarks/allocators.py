"""What unequal shares cost: a decoded token beside equal shares at the same total, and the bytes that are held.

`python benchmarks/allocators.py --help`. All in the attention implementation "paged_eviction", the same policy, the
same prompt, interleaved; ratios are medians over rounds of one run's time divided by that of equal shares in the same
round.
"""

import argparse
from statistics import median
from typing import Any

import torch
from common import interleaved, ratio, save

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval.models.loading import load_model
from hf_paged_eviction_eval.options.settings import Settings

EQUAL = "uniform"


class Decoder:
    """Decodes `steps` tokens after a prompt."""

    def __init__(self, model: Any, ids: torch.Tensor, options: argparse.Namespace, allocator: str) -> None:
        self.model, self.steps = model, options.steps
        self.cache = PagedEvictionCache(
            model.config,
            options.budget,
            policy=options.policy,
            heads="separate",
            allocator=allocator,
            sink_tokens=4,
        )
        self.token = ids[:, -1:]
        with torch.no_grad():
            model(ids, past_key_values=self.cache, logits_to_keep=1)

    @torch.no_grad()
    def __call__(self) -> None:
        for _ in range(self.steps):
            self.model(self.token, past_key_values=self.cache)

    def facts(self) -> dict[str, Any]:
        """Bytes as a share of what the budget says, and the shortest and longest head."""
        layers = [layer for _, layer in self.cache.paged_layers]
        tokens = [(layer.positions >= 0).sum(-1) for layer in layers]
        keys, values = (states.shape[-1] * states.element_size() for states in (layers[0].keys, layers[0].values))
        budget = self.cache.budget * (keys + values) * sum(held.numel() for held in tokens)
        return {
            "bytes_of_budget": sum(layer.storage_bytes for layer in layers) / budget,
            "shortest": min(int(held.min()) for held in tokens),
            "longest": max(int(held.max()) for held in tokens),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a folder or a name on the Hugging Face Hub")
    parser.add_argument("--name", help="under which the results are kept; the last part of --model")
    parser.add_argument("--policy", default="calibrated:embedded", help="its scores have a common unit")
    parser.add_argument("--allocators", default="global,ada_kv,cake")
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32, help="decoded tokens per timing (two blocks)")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()

    torch.set_num_threads(1)
    model = load_model(Settings(model=options.model, policies=(), budgets=()))
    model.set_attn_implementation("paged_eviction")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size - 10, (1, options.context), generator=generator)
    names = (EQUAL, *options.allocators.split(","))
    decoders = {name: Decoder(model, ids, options, name) for name in names}
    facts = {name: decoder.facts() for name, decoder in decoders.items()}
    times = interleaved(dict(decoders), options.rounds)
    rows = {
        name: {
            "step_ms": 1000 * median(times[name]) / options.steps,
            "of_equal_shares": ratio(times, name, EQUAL),
            **facts[name],
        }
        for name in names
    }
    for name, row in rows.items():
        print(
            f"{name:10s} {row['step_ms']:8.2f} ms per token, {row['of_equal_shares']:.3f} of equal shares; "
            f"{row['bytes_of_budget']:.3f} of the budget's bytes; {row['shortest']} to {row['longest']} tokens per head"
        )
    name = options.name or options.model.rstrip("/").rpartition("/")[2]
    shown = {key: value for key, value in vars(options).items() if key not in ("model", "name", "policy")}
    save(f"allocators_{name}", {"model": name, "policy": options.policy.partition(":")[0], "settings": shown, **rows})


if __name__ == "__main__":
    main()

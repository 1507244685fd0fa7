"""What a step costs under recall at the layer shape of a 1B model: `python benchmarks/recall_shape.py --help`.

Random weights and random keys, in bfloat16, one thread: nothing is said about answers here. Consecutive queries of
random weights ask for almost unrelated blocks, so more comes back than in a text; see recall_bytes.json for one that
means something. Caches are filled without reading: each layer is handed keys, values and queries of the whole text.

Milliseconds are per layer and decoded token, medians over all steps; the variants take turns.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from common import save
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.observer import Queries
from hf_paged_eviction.queries.weights import Logits
from hf_paged_eviction_eval.running.prefill import replay

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
}
BUDGET = 1024
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "drop": {"budget": BUDGET},
    "recall": {"budget": BUDGET, "disposal": "recall(blocks=16)"},
    "recall, ahead": {"budget": BUDGET, "disposal": "recall(blocks=16, prefetch=16)"},
    "recall, every 16": {"budget": BUDGET, "disposal": "recall(blocks=16, every=16)"},
    "recall, vector": {"budget": BUDGET, "disposal": "recall(blocks=16, summary=vector)"},
}


def filled(model: Any, length: int, settings: dict[str, Any]) -> DynamicCache:
    """A cache that has seen random states."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    source = DynamicCache(config=config)
    queries = {}
    heads, groups, width = config.num_key_value_heads, config.num_attention_heads, config.head_dim
    for index in range(config.num_hidden_layers):
        states = (torch.randn(1, heads, length, width, generator=generator).to(model.dtype) for _ in "kv")
        keys, values = states
        source.update(keys, values, index)
        query = torch.randn(1, groups, 1, width, generator=generator).to(model.dtype)
        queries[index] = Queries(query.expand(-1, -1, length, -1), keys, Logits(width**-0.5))
    if not settings:
        return source
    cache = PagedEvictionCache(config, policy="keydiff", **settings)
    replay(source, cache, torch.tensor([0]), length, queries)
    return cache


@torch.inference_mode()
def measure(model: Any, length: int, steps: int) -> dict[str, Any]:
    """Times and bytes of each way."""
    caches = {name: filled(model, length, settings) for name, settings in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    layers = model.config.num_hidden_layers
    for step in range(-2, steps):
        token = torch.randint(model.config.vocab_size, (1, 1))
        for name, cache in caches.items():
            start = time.perf_counter()
            model(input_ids=token, past_key_values=cache, use_cache=True)
            if step >= 0:
                times[name].append(time.perf_counter() - start)
    found = {}
    for name, cache in caches.items():
        paged = isinstance(cache, PagedEvictionCache)
        stats = cache.stats() if paged else None
        found[name] = {
            "layer_ms": 1e3 * median(times[name]) / layers,
            "device_bytes": stats.device_bytes if stats else sum(2 * layer.keys.nbytes for layer in cache.layers),
            "host_bytes": stats.host_bytes if stats else 0,
            "blocks_per_layer_and_step": stats.faults / layers / (steps + 2) if stats else 0,
            "foreseen": sum(layer.outlet.stage.foreseen for _, layer in cache.paged_layers) / stats.faults
            if stats and name == "recall, ahead"
            else None,
        }
        print(length, name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, attn_implementation="paged_eviction")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="paged_eviction").eval()
    lengths = {str(length): measure(model, length, options.steps) for length in options.lengths}
    save("recall_shape", {"shape": SHAPE, "budget": BUDGET, "lengths": lengths})


if __name__ == "__main__":
    main()

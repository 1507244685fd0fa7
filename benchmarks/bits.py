"""Time and memory of a decoded token at each precision: `python benchmarks/bits.py --help`.

A cache of C tokens as they came beside caches of as many tokens in 8, 4 and 2 bits, and of as many as fit into the same
bytes. One row; keys and values are random, since time does not depend on them. Memory is that of the cache, and the
most that a step takes on top: a layer's tokens are decoded for its attention and given up after it.
"""

import argparse
from statistics import median
from typing import Any

import torch
from common import interleaved, ratio, save
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval.bench.compiling import compiled, room_for_graphs
from hf_paged_eviction_eval.bench.decoder import Decoder
from hf_paged_eviction_eval.bench.filling import fill, layer_shapes
from hf_paged_eviction_eval.bench.peak import growth
from hf_paged_eviction_eval.bench.shapes import SHAPES
from hf_paged_eviction_eval.bench.variants import Held

BITS = (None, 8, 4, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="100m", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=2, help="of the model's")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="eager steps alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**{**SHAPES[options.model], "num_hidden_layers": options.layers})
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).to(device).eval()
    results: dict[str, Any] = {"settings": vars(options), "device": device, "dtype": str(dtype)}
    for static in (False,) if options.no_compile else (False, True):
        with room_for_graphs():
            forward = compiled(model) if static else model.forward
            results["compiled" if static else "eager"] = measure(model, forward, options, static)
    save("bits", results)


def measure(model: Any, forward: Any, options: argparse.Namespace, static: bool) -> dict[str, Any]:
    """Milliseconds and bytes by name."""
    decoders = {
        f"{bits or 'no'} bits, {tokens} tokens": make(model, forward, bits, tokens, static)
        for bits, tokens in sizes(model, options.budget)
    }
    base = next(iter(decoders))
    times = interleaved(
        {name: lambda each=each: each.run(options.steps) and None for name, each in decoders.items()}, options.rounds
    )
    found = {}
    for name, decoder in decoders.items():
        taken = growth(lambda each=decoder: each.run(1), model.device)
        found[name] = {
            "step_ms": round(1e3 * median(times[name]) / options.steps, 3),
            f"times {base}": round(ratio(times, name, base), 2),
            "cache_bytes": decoder.held.cache.stats().storage_bytes,
            "step_bytes": taken,
        }
        print("compiled" if static else "eager", name, found[name], flush=True)
    return found


def sizes(model: Any, budget: int) -> list[tuple[int | None, int]]:
    """Bits and tokens: as many tokens as the budget, and as many as its bytes hold."""
    most = storage_bytes(model, budget, None)
    same_bytes = []
    for bits in BITS[1:]:
        tokens = budget
        while storage_bytes(model, tokens + 16, bits) <= most:
            tokens += 16
        same_bytes.append((bits, tokens))
    return [*((bits, budget) for bits in BITS), *same_bytes]


def storage_bytes(model: Any, tokens: int, bits: int | None) -> int:
    """As the cache counts them, for one row."""
    cache, config = PagedEvictionCache(model.config, budget=tokens, bits=bits), model.config
    width = config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, width, model.dtype, torch.device("meta"))
    return int(cache.stats().storage_bytes)


def make(model: Any, forward: Any, bits: int | None, tokens: int, static: bool) -> Decoder:
    """A full cache, and what decodes with it."""
    mask = torch.ones(1, 2 * tokens, dtype=torch.long, device=model.device)
    cache = PagedEvictionCache(model.config, budget=tokens, bits=bits, static=static, attention_mask=mask)
    fill(cache, layer_shapes(model), 1, 2 * tokens, model)
    return Decoder(model, forward, Held(cache, 2 * tokens, 2 * tokens, rewinds=False), 1)


if __name__ == "__main__":
    main()

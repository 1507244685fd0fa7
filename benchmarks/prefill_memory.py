"""Peak KV bytes of a chunked prefill: `python benchmarks/prefill_memory.py --help`.

Counts every live tensor of the shape of keys or values (storage, concatenations, copies, the new tokens themselves) of
all layers at once, and reports the largest sum seen during the prefill. Runs kvpress too where it is installed (it
needs transformers below 5.3).
"""

import argparse
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from common import save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedConfig

from hf_paged_eviction import PagedEvictionCache


class LiveKV(TorchDispatchMode):  # type: ignore[misc]
    """Sums the bytes of live storages that were ever seen as `[batch, kv_heads, n, head_dim]`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.heads, self.width = config.num_key_value_heads, config.head_dim
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, Tensor)
                and leaf.ndim == 4
                and (leaf.shape[1], leaf.shape[3])
                == (
                    self.heads,
                    self.width,
                )
            ):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes and storage.nbytes():
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, key, None)
            self.peak = max(self.peak, sum(self.sizes.values()))


def kvpress_rows() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """kvpress settings to compare with: one that compresses the prompt, one that also compresses while decoding."""
    try:
        from kvpress import DecodingPress, KnormPress
    except ImportError:
        return {}
    return {
        "kvpress KnormPress": lambda: KnormPress(compression_ratio=0.9375),
        "kvpress DecodingPress(KnormPress)": lambda: DecodingPress(
            base_press=KnormPress(), compression_interval=1, target_size=1024
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * options.tokens,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 250, (1, options.tokens))
    per_token = options.layers * 2 * config.num_key_value_heads * config.head_dim * 4

    def measure(cache: Any, around: AbstractContextManager[Any], chunk: int) -> dict[str, float]:
        live = LiveKV(config)
        with torch.no_grad(), around, live:
            for part in ids.split(chunk, dim=1):
                model(part, past_key_values=cache, logits_to_keep=1)
        held = cache.layers[0].held if isinstance(cache, PagedEvictionCache) else cache.layers[0].keys.shape[2]
        return {"peak_bytes": live.peak, "peak_tokens": live.peak / per_token, "held_tokens_after": held}

    def paged() -> PagedEvictionCache:
        return PagedEvictionCache(config, budget=options.budget)

    rows: dict[str, dict[str, float]] = {}
    rows["PagedEvictionCache, chunked"] = measure(paged(), nullcontext(), options.chunk)
    rows["PagedEvictionCache, one forward"] = measure(paged(), nullcontext(), options.tokens)
    rows["DynamicCache, chunked"] = measure(DynamicCache(config=config), nullcontext(), options.chunk)
    for name, press in kvpress_rows().items():
        rows[f"{name}, chunked"] = measure(DynamicCache(config=config), press()(model), options.chunk)
    limit = 1.1 * (options.budget + options.chunk)
    print(f"budget + chunk = {options.budget + options.chunk} tokens; goal: at most {limit:.0f}\n")
    print("| cache | peak KV, MiB | peak KV, tokens per layer | held afterwards |\n|---|---|---|---|")
    for name, row in rows.items():
        mib = row["peak_bytes"] / 2**20
        print(f"| {name} | {mib:.1f} | {row['peak_tokens']:.0f} | {row['held_tokens_after']:.0f} |")
    save("prefill_memory", {"settings": vars(options), "rows": rows})


if __name__ == "__main__":
    main()

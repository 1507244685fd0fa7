"""What `positions="cache"` costs: `python benchmarks/positions.py --help`.

Time of a decoded token and bytes of storage with the tokens held at their places in the text, and one after the other:
with a turned copy of the keys that is made anew once per block (what the package does), and with keys turned whenever
attention reads them (the other way, without a copy). The model has random weights; texts are random states, fed to the
cache directly, so that a long one costs little.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from common import benchmark_config, ratio, save
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval.bench import timing

WAYS = ("text", "cache, a copy", "cache, when read")


class Decoder:
    """Decodes single tokens after a text of so many."""

    def __init__(self, model: Any, way: str, length: int, steps: int, **options: Any) -> None:
        self.model, self.steps = model, steps
        self.cache = PagedEvictionCache(model.config, positions=way.split(",")[0], **options)
        if way == "cache, when read":
            for layer in self.cache.layers:
                layer.contents.shown = _turned_when_read(layer)
        config, chunk = model.config, 8192
        generator = torch.Generator().manual_seed(0)
        for start in range(0, length, chunk):
            shape = (1, config.num_key_value_heads, min(chunk, length - start), config.head_dim)
            for layer in range(config.num_hidden_layers):
                self.cache.update(*(torch.randn(shape, generator=generator) for _ in range(2)), layer)
        self.token = torch.full((1, 1), 7)

    @torch.inference_mode()
    def __call__(self) -> float:
        """Seconds of this process, which other processes of the machine do not count in."""
        began = time.process_time()
        for _ in range(self.steps):
            at = torch.tensor([[self.cache.get_seq_length()]])
            self.model(self.token, position_ids=at, past_key_values=self.cache, use_cache=True)
        return time.process_time() - began


def _turned_when_read(layer: Any) -> Any:
    """Instead of `Contents.shown`."""
    layer.contents.turn_keys = lambda: None

    def read(held: int | None = None) -> tuple[Tensor, Tensor]:
        keys, values = layer.store.read(held)
        if not layer.table.full:
            return keys, values
        return layer.store.turning.rotary.rotate_by(keys, layer.table.held_shifts).to(keys.dtype), values

    return read


def _give_up(name: str, error: Exception) -> None:
    raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 262144])
    parser.add_argument("--policy", default="keydiff")
    parser.add_argument("--steps", type=int, default=16, help="a multiple of the block size of 16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_config(benchmark_config(), dtype=getattr(torch, options.dtype)).eval()
    results: list[dict[str, Any]] = []
    for length in options.lengths:
        sizes = {"budget": options.budget, "policy": options.policy}
        runs = {way: Decoder(model, way, length, options.steps, **sizes) for way in WAYS}
        for run in runs.values():
            run()
        times = timing.interleaved(runs, options.rounds, _give_up)
        for way in WAYS:
            found = {
                "way": way,
                "length": length,
                "step_ms": round(1e3 * median(times[way]) / options.steps, 3),
                "step / text": round(ratio(times, way, "text"), 4),
                "storage_bytes": runs[way].cache.stats().storage_bytes,
            }
            results.append(found)
            print(found, flush=True)
    save("positions", {"settings": vars(options), "results": results})


if __name__ == "__main__":
    main()

"""What the benchmarks share: model shapes, interleaved timing, results with hardware and versions."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig

from hf_paged_eviction_eval.environment import cpu_name, versions

RESULTS = Path(__file__).parent / "results"

# About 100 M parameters with grouped-query attention; random weights, since time does not depend on them.
BENCHMARK_MODEL = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
}


def benchmark_config() -> PreTrainedConfig:
    """Configuration of the benchmark model."""
    return LlamaConfig(**BENCHMARK_MODEL)


def fill(cache: Any, config: PreTrainedConfig, tokens: int, chunk: int = 1024) -> None:
    """Feed `tokens` random keys and values to every layer: a prefill without the model around it."""
    heads, width = config.num_key_value_heads, config.head_dim
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(1, heads, count, width), torch.randn(1, heads, count, width), layer)


def interleaved(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Time every run once per round, so that the noise of a busy machine hits all of them alike. Seconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], of: str, to: str) -> float:
    """Median over rounds of one run's time divided by another's of the same round."""
    return median(a / b for a, b in zip(times[of], times[to], strict=True))


def environment() -> dict[str, Any]:
    """Hardware and versions, for the results file."""
    return {"cpu": cpu_name(), "torch_threads": torch.get_num_threads(), "device": "cpu", **versions()}


def save(name: str, results: dict[str, Any]) -> None:
    """Write `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **results}, indent=2) + "\n")
    print(f"written: {path}")

"""CPU time of a step and of reading, as ratios to `DynamicCache`, and whether they reach the goals.

    python benchmarks/goals.py [--only steps] [--rounds 9]

The first line is what a budget in bytes gets after `prepare`: heads with budgets of their own, in 4 bits. Each run
appends a row to `results/goals.jsonl`. Weights, budgets of heads and profiles are drawn: time does not depend on them.
One thread. All caches take turns; a turn is a block of 16 steps, so it has one choice of a victim.
"""

import argparse
import gc
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import RESULTS, timed_on
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.internals import PAGED_EVICTION
from hf_paged_eviction.learned.calibration import Calibration, fingerprint, save_calibration
from hf_paged_eviction_eval.bench.rows import interleaved, ratio
from hf_paged_eviction_eval.models.environment import commit

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from calibrations import drawn_score

SERIES = RESULTS / "goals.jsonl"
BLOCK, CHUNK, TEXT = 16, 512, 8192
HEADS_4_BITS = "heads, 4 bits"
#: Lines of steps, and the options of their caches; `heads` and `profile` are replaced by drawn ones.
STEPS: dict[str, dict[str, Any]] = {
    HEADS_4_BITS: {"policy": "keydiff", "allocator": "heads", "bits": 4},
    "heads, 4 bits, snapkv": {"policy": "snapkv", "allocator": "heads", "bits": 4},
    "heads, 4 bits, observed": {"policy": "observed", "allocator": "heads", "bits": 4},
    "heads": {"policy": "keydiff", "allocator": "heads"},
    "equal budgets": {"policy": "keydiff"},
    "equal budgets, static": {"policy": "keydiff", "static": True},
}
#: Lines of reading 8,192 tokens in chunks.
READING: dict[str, dict[str, Any]] = {
    "heads, 4 bits, 1/4": {**STEPS[HEADS_4_BITS], "budget": f"25% of memory of {TEXT} tokens"},
    "heads, 4 bits, 1/8": {**STEPS[HEADS_4_BITS], "budget": f"12.5% of memory of {TEXT} tokens"},
    "without `prepare`, 1/4": {"budget": f"25% of memory of {TEXT} tokens"},
}
#: What a run measures: lines, layers, sizes of the model, tokens of the budget.
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
SHAPES = {
    "tiny": {"layers": 30, "held": 128, "vocabulary": 64, "sizes": TINY},
    "smollm2": {"layers": 30, "held": 1024, "vocabulary": 49152, "sizes": SMOLLM2},
    "reading": {"layers": 30, "held": 0, "vocabulary": 4096, "sizes": SMOLLM2},
}
#: The default's step is also compared with a `DynamicCache` of the whole text.
LENGTHS = (2048, 4096, TEXT)
#: The same at shares of the memory of the longest text.
SHARES = HEADS_4_BITS + ", 1/4", HEADS_4_BITS + ", 1/8"
GOALS = {
    "tiny": {HEADS_4_BITS: 1.35, "heads, 4 bits, snapkv": 1.45, "heads, 4 bits, observed": 1.45, "heads": 1.15},
    "smollm2": {HEADS_4_BITS: 1.1, "heads, 4 bits, snapkv": 1.1, "heads, 4 bits, observed": 1.1},
    "reading": {"heads, 4 bits, 1/4": 1.0, "heads, 4 bits, 1/8": 0.87, "without `prepare`, 1/4": 1.2},
}
Runs = dict[str, Callable[[], float]]


class Timed:
    """A model of a shape, and the times that it takes."""

    def __init__(self, layers: int, held: int, vocabulary: int, sizes: dict[str, int], folder: str) -> None:
        config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, max_position_embeddings=65536, **sizes)
        torch.manual_seed(0)
        self.model, self.config, self.held = LlamaForCausalLM(config).eval(), config, held
        draw, heads = torch.Generator().manual_seed(3), config.num_key_value_heads
        self._heads = Heads.of((0.25 + 1.5 * torch.rand(layers, heads, generator=draw)).tolist())
        scores = {index: drawn_score(heads, config.head_dim, draw) for index in range(layers)}
        self._profile = str(Path(folder, f"{layers}-{config.hidden_size}.safetensors"))
        save_calibration(Calibration(scores, fingerprint(config)), self._profile)

    def cache(self, options: dict[str, Any] | None) -> Any:
        """A new cache, and its attention implementation set; None = `DynamicCache`."""
        self.model.set_attn_implementation("sdpa" if options is None else PAGED_EVICTION)
        if options is None:
            return DynamicCache()
        replaced: dict[str, Any] = {"allocator": self._heads, "heads": "separate"} if "allocator" in options else {}
        if options.get("policy") == "observed":
            replaced["profile"] = self._profile
        return PagedEvictionCache(self.config, **{"budget": self.held, **options, **replaced})

    @torch.inference_mode()
    def read(self, cache: Any, tokens: int) -> float:
        """CPU seconds of a forward."""
        ids = torch.randint(0, self.config.vocab_size, (1, tokens))
        begun = time.process_time()
        self.model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        return time.process_time() - begun

    def steps(self, options: dict[str, Any] | None, length: int) -> Callable[[], float]:
        """A function that decodes a block behind `length` tokens and returns CPU seconds of a step. A `DynamicCache`
        holds so many on average."""
        cache, length = self.cache(options), length - (BLOCK // 2 if options is None else 0)
        for layer in range(
            self.config.num_hidden_layers if options is None else 0
        ):  # at once, because time is the same
            states = torch.randn(2, 1, self.config.num_key_value_heads, length, self.config.head_dim)
            cache.update(states[0], states[1], layer)
        for _ in range(0, 0 if options is None else length, CHUNK):
            self.read(cache, CHUNK)
        attention = self.model.config._attn_implementation

        def run() -> float:
            self.model.set_attn_implementation(attention)
            gc.collect()
            gc.disable()
            if options is None and (grown := cache.get_seq_length() - length):
                cache.crop(-grown)
            seconds = sum(self.read(cache, 1) for _ in range(BLOCK)) / BLOCK
            gc.enable()
            return seconds

        run()
        return run

    def reading(self, options: dict[str, Any] | None) -> Callable[[], float]:
        """A function that reads a text in chunks and returns CPU seconds."""

        def run() -> float:
            cache = self.cache(options)
            gc.collect()
            return sum(self.read(cache, CHUNK) for _ in range(TEXT // CHUNK))

        return run


def measure(shape: str, rounds: int, folder: str) -> dict[str, float]:
    """Ratios of every line of a shape."""
    timed = Timed(**SHAPES[shape], folder=folder)  # type: ignore[arg-type]
    full = "DynamicCache"
    if shape == "reading":
        times = interleaved({name: timed.reading(READING.get(name)) for name in (full, *READING)}, min(rounds, 3))
        return {name: ratio(times[name], times[full]) for name in READING}
    lengths = {f"{full}, {length:,}": length for length in (LENGTHS if shape == "smollm2" else ())}
    # A large cache takes a minute to fill: those with a table of heads.
    lines = {name: options for name, options in STEPS.items() if shape == "tiny" or "allocator" in options}
    runs: Runs = {name: timed.steps(options, timed.held + CHUNK) for name, options in lines.items()}
    runs |= {name: timed.steps(None, length) for name, length in {full: timed.held, **lengths}.items()}
    if lengths:
        runs |= {name: timed.steps(READING[name], TEXT) for name in SHARES}
    times = interleaved(runs, rounds)
    ratios = {name: ratio(times[name], times[full]) for name in lines}
    beyond = [(HEADS_4_BITS, name) for name in lengths] + [(name, list(lengths)[-1]) for name in SHARES if lengths]
    return ratios | {f"{name} / {longer}": ratio(times[name], times[longer]) for name, longer in beyond}


def verdicts(row: dict[str, Any]) -> Iterator[str]:
    """A line for every ratio of a row, with its goal."""
    for shape, ratios in row["ratios"].items():
        for name, value in ratios.items():
            goal = GOALS[shape].get(name)
            verdict = "" if goal is None else f", goal {goal}, {'met' if value <= goal else 'missed'}"
            yield f"{shape}: {name}: {value:.3f}{verdict}"


def compiler() -> str | None:
    """The C compiler, as it names itself."""
    path = shutil.which("cc")
    shown = path and subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return shown.partition("\n")[0] if shown else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        ratios = {shape: measure(shape, options.rounds, folder) for shape in options.only}
    row = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "compiler": compiler()}
    row |= {"rounds": options.rounds, **timed_on()}
    row["ratios"] = {shape: {name: round(value, 3) for name, value in of.items()} for shape, of in ratios.items()}
    with SERIES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(*verdicts(row), sep="\n")


if __name__ == "__main__":
    main()

"""Attention of one decode step to codes: in the Triton kernels, by operators of torch, and without bits.

Each is called from Python, as in an eager step, and where there are CUDA graphs replayed from one: the time of the
device alone.

    python benchmarks/gpu_codes.py --device cuda      # `make gpu` does so, too

One layer in the shape of Llama 3.2 1B, in bfloat16. `none` is scaled_dot_product_attention to as many tokens as they
came. It says how far the kernels are from the operators, and fails where that is more than bfloat16 rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_paged_eviction.attention.in_place import carried
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.integration.model_rotary import layer_rotaries
from hf_paged_eviction.precision import few_bits, fused
from hf_paged_eviction.precision.codec import Codec
from hf_paged_eviction.precision.few_bits import FewBits
from hf_paged_eviction.precision.in_codes import InCodes
from hf_paged_eviction.store.store import Arrived, Store
from hf_paged_eviction_eval.bench.rows import interleaved
from hf_paged_eviction_eval.bench.shapes import config_of
from hf_paged_eviction_eval.running.efficiency import Stopwatch

CONFIG = config_of("llama-3.2-1b")
HEADS, DIM = CONFIG.num_key_value_heads, CONFIG.head_dim
#: Of the largest number: what outputs in bfloat16 may differ by.
SHARE = 2e-2


def held(rows: int, slots: int, bits: int, device: str) -> tuple[InCodes, Tensor, Tensor]:
    """So many random tokens in codes, and as they came."""
    keys, values = (torch.randn(rows, HEADS, slots, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    rotary = layer_rotaries(CONFIG, [0])[0]
    store = Store(FewBits((Codec(bits, True, centred=True, rotary=rotary), Codec(bits, True)), 16, 4))
    store.start(keys, values, slots, slots)
    store.meet(keys, values, None)
    positions = torch.arange(slots, device=device).expand(rows, 1, -1)
    store.append(0, keys, values, Arrived(positions, positions, torch.full((rows,), slots, device=device)))
    reader: Any = carried(store.carrier(keys[:, :, -1:]))  # type: ignore[arg-type]
    return reader.args[0], keys, values


def calls(rows: int, slots: int, bits: int, device: str) -> tuple[dict[str, Callable[[], Tensor]], str | None]:
    """The ways to attend, and why the kernels are not among them."""
    codes, keys, values = held(rows, slots, bits, device)
    query = torch.randn(rows, CONFIG.num_attention_heads, 1, DIM, device=device, dtype=torch.bfloat16)
    logits = Logits(DIM**-0.5)

    def operators() -> Tensor:
        return codes.read(query, None, logits).to(query.dtype)

    ways: dict[str, Callable[[], Tensor]] = {"operators": operators}
    ways["none"] = lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    if (obstacle := fused.obstacle(codes, query)) is None:
        ways["kernels"] = lambda: fused.read(codes, query, None, logits)
    return ways, obstacle


def repeated(call: Callable[[], Tensor], steps: int) -> Callable[[], None]:
    """So many calls."""

    def run() -> None:
        for _ in range(steps):
            call()

    return run


def replayed(call: Callable[[], Tensor], steps: int) -> Callable[[], None]:
    """So many calls in a CUDA graph."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        repeated(call, steps)()
    return graph.replay


def microseconds(runs: dict[str, Callable[[], None]], device: str, steps: int, rounds: int) -> dict[str, float]:
    """The median of each, per call."""

    def seconds(run: Callable[[], None]) -> float:
        watch = Stopwatch(torch.device(device))
        run()
        return watch.lap() / steps

    times = interleaved({name: partial(seconds, run) for name, run in runs.items()}, rounds)
    return {name: round(1e6 * median(values), 1) for name, values in times.items()}


def row(rows: int, slots: int, bits: int, device: str, steps: int, rounds: int) -> dict[str, Any]:
    """Microseconds of each way, and the largest difference of the kernels as a share of the largest number."""
    ways, obstacle = calls(rows, slots, bits, device)
    outputs = {name: call().float() for name, call in ways.items()}
    measured: dict[str, Any] = {"rows": rows, "tokens": slots, "bits": bits, "obstacle": obstacle}
    runs = {name: repeated(call, steps) for name, call in ways.items()}
    measured["us"] = microseconds(runs, device, steps, rounds)
    if device.startswith("cuda"):
        graphs = {name: replayed(call, steps) for name, call in ways.items() if name != "operators"}
        measured["replayed_us"] = microseconds(graphs, device, steps, rounds)
    if "kernels" in outputs:
        expected = outputs["operators"]
        measured["difference"] = float((outputs["kernels"] - expected).abs().max() / expected.abs().max())
    return measured


def main() -> int:
    """0 unless the kernels are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", default="1024,8192,32768")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file with all rows")
    options = parser.parse_args()
    few_bits.FEW = 0
    table = []
    with torch.no_grad():
        sizes = ([int(size) for size in words.split(",")] for words in (options.rows, options.tokens, options.bits))
        for rows, slots, bits in product(*sizes):
            measured = row(rows, slots, bits, options.device, options.steps, options.rounds)
            table.append(measured)
            shown = "  ".join(f"{name} {us:.1f} us" for name, us in measured["us"].items())
            if "replayed_us" in measured:
                shown += "; replayed: " + "  ".join(f"{name} {us:.1f}" for name, us in measured["replayed_us"].items())
            without = f"; no kernels: {measured['obstacle']}" if measured["obstacle"] else ""
            print(f"{rows} rows, {slots} tokens, {bits} bits: {shown}{without}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps({"rows": table}, indent=1) + "\n", "utf-8")
    return max(measured.get("difference", 0.0) for measured in table) > SHARE


if __name__ == "__main__":
    sys.exit(main())

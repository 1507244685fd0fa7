"""How much the process grows while a long prompt is read in chunks, with each cache in a process of its own.

    python benchmarks/process_memory.py results/models/SmolLM2-135M-Instruct.Q4_1

writes `benchmarks/results/process_memory.json` (`--lengths 8192` adds a length) and prints a table: keys and values by
count, what the process holds when the prompt has been read, and the most that it held on the way, each beside the
model. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from common import RESULTS, save, table, timed_on
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import CACHE_ARGUMENT
from hf_paged_eviction_eval.models.device import model_settings
from hf_paged_eviction_eval.models.loading import load_model
from hf_paged_eviction_eval.options.model import ModelOptions
from hf_paged_eviction_eval.running.efficiency import PeakMemory, kv_bytes, process_bytes

LENGTHS = (1024, 2048, 3072)
CHUNK, BUDGET = 256, 1024
#: Caches by name.
CACHES: dict[str, dict[str, Any] | None] = {
    "DynamicCache": None,
    "budget 1,024, after prepare": {"budget": BUDGET},
    "budget 1,024, keydiff": {"budget": BUDGET, "policy": "keydiff"},
}


@torch.inference_mode()
def grown(model_name: str, options: dict[str, Any] | None, length: int) -> dict[str, int]:
    """In a process of its own: bytes that reading a prompt of this length takes beside the model."""
    torch.set_num_threads(1)
    model = load_model(model_settings(ModelOptions(model=model_name, device="cpu", dtype="float32")))
    model.set_attn_implementation("paged_eviction" if options else "sdpa")
    for parameter in model.parameters():  # a file that is mapped counts only as far as it has been read
        parameter.data = parameter.data.clone()
    ids = torch.randint(0, 997, (1, length), generator=torch.Generator().manual_seed(0))
    model(ids[:, :CHUNK], logits_to_keep=1, use_cache=False)
    cache = DynamicCache(config=model.config) if options is None else PagedEvictionCache(model.config, **options)
    base, peak = process_bytes("VmRSS"), PeakMemory(model.device)
    for start in range(0, length, CHUNK):
        model(ids[:, start : start + CHUNK], logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    return {
        "keys_and_values": kv_bytes(cache),
        "grown": process_bytes("VmRSS") - base,
        "peak": (peak.bytes() or 0) - base,
    }


def _others(lengths: set[int]) -> list[dict[str, Any]]:
    """Rows of other lengths that were measured before with the same versions."""
    path = RESULTS / "process_memory.json"
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    same = before.get("environment") == timed_on() and (before["chunk"], before["budget"]) == (CHUNK, BUDGET)
    return [row for row in before["rows"] if row["length"] not in lengths] if same else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=LENGTHS)
    options = parser.parse_args()
    rows = []
    for length in options.lengths:
        for name, cache_options in CACHES.items():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                row = pool.submit(grown, options.model, cache_options, length).result()
            rows.append({"cache": name, "length": length, **row})
            print(rows[-1], flush=True)
    rows = [*_others({row["length"] for row in rows}), *rows]
    save("process_memory", {"chunk": CHUNK, "budget": BUDGET, "rows": sorted(rows, key=lambda row: row["length"])})
    header = ("cache", "tokens", "keys and values, MiB", "growth of the process", "its peak")
    shown = (
        [
            row["cache"],
            f"{row['length']:,}",
            *(f"{row[key] / 2**20:.0f}" for key in ("keys_and_values", "grown", "peak")),
        ]
        for row in rows
    )
    print(table(header, shown))


if __name__ == "__main__":
    main()

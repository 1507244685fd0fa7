"""What it costs to read a prompt and to decode behind it, of a real model: `python benchmarks/reading.py --help`.

CPU seconds of one thread, caches in turn and the median of all rounds, over those of the full cache; and the peak of a
process of its own, less what it had with the model alone: the least of all rounds, since what a process keeps of freed
memory differs by 100 MiB from run to run. The longest prompt is read by these processes alone. A variant is a policy,
an allocator behind @, and the tokens of a block behind a slash: auto/4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import torch
from common import save
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_paged_eviction import PagedEvictionCache


def make(model: Any, variant: str, budget: int) -> Any:
    """An empty cache."""
    if variant == "full":
        return DynamicCache(config=model.config)
    name, _, size = variant.partition("/")
    policy, _, allocator = name.partition("@")
    more = {"allocator": allocator} if allocator else {}
    return PagedEvictionCache(model.config, budget=budget, policy=policy, block_size=int(size or 16), **more)


def timed(model: Any, cache: Any, ids: torch.Tensor, steps: int) -> tuple[float, float]:
    """CPU seconds of the prompt, and of one step behind it."""
    start = time.process_time()
    model(ids, past_key_values=cache, logits_to_keep=1)
    read = time.process_time()
    for _ in range(steps):
        model(ids[:, -1:], past_key_values=cache)
    return read - start, (time.process_time() - read) / max(steps, 1)


def resident(what: str) -> float:
    """Of this process, MiB: VmRSS now, VmHWM at most since it was forgotten (Linux)."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(status.partition(f"{what}:")[2].split()[0]) / 1024


def alone(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Least peak and seconds of readings, each in a process of its own, by length and variant."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for length in options.lengths:
        for variant in (each for each in options.variants if "/" not in each):
            command = [sys.executable, __file__, "--model", options.model, "--lengths", str(length)]
            command += ["--variants", variant, "--share", str(options.share), "--child"]
            runs = [
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
                for _ in range(options.rounds)
            ]
            least = {name: min(run[name] for run in runs) for name in runs[0]}
            found.setdefault(str(length), {})[variant] = least
            print(length, variant, least, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder; auto looks its calibration up by its name")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--share", type=float, default=0.25, help="of the prompt, held")
    parser.add_argument(
        "--variants", nargs="+", default=["full", "paged_eviction", "auto", "auto/4", "self_calibrated@global"]
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the shortest prompt, and of every process")
    parser.add_argument("--steps", type=int, default=96, help="tokens decoded behind the prompt")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="paged_eviction"
    ).eval()
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : max(options.lengths)]
    shortest = min(options.lengths)
    with torch.inference_mode():
        if options.child:
            model(ids[:, :64], logits_to_keep=1)
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
            before = resident("VmRSS")
            seconds, _ = timed(model, make(model, options.variants[0], int(options.share * shortest)), ids, 0)
            print(json.dumps({"seconds": round(seconds, 2), "peak_mib": round(resident("VmHWM") - before, 1)}))
            return
        times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in options.variants}
        for _ in range(options.rounds):
            for variant, found in times.items():
                cache = make(model, variant, int(options.share * shortest))
                found.append(timed(model, cache, ids[:, :shortest], options.steps))
                print(variant, found[-1], flush=True)
    rows = {
        variant: {"read": round(median(a for a, _ in found), 3), "step": round(median(b for _, b in found), 4)}
        for variant, found in times.items()
    }
    settings = {name: value for name, value in vars(options).items() if name not in ("child", "model")}
    save("reading", {"settings": settings, "model": Path(options.model).name, "rows": rows, "alone": alone(options)})


if __name__ == "__main__":
    main()

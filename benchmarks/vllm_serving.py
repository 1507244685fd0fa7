"""Requests served by vLLM with eviction, by stock vLLM and by this project's continuous batching, one after the other.

    .venvs/vllm/bin/python benchmarks/vllm_serving.py --model FOLDER --requests 16 --tokens 2048 --new 64 --budget 512

All requests arrive at once. The memory for keys and values holds a part (`--share`) of the requests as they come. Each
variant is a process of its own; with `--profile FILE` one more, `prepared`, evicts by the profile, with a budget for
each head. `--repeats` runs the variants in turn several times, so that other work on the machine meets all of them.
Prints every run and the medians, and writes the runs as JSON with `--output`. Times are those of a clock on the wall;
on a machine that other work shares, `--clock cpu` counts the seconds that the process computes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VARIANTS = ("stock", "evicting", "prepared", "own")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
#: A shape with random weights, for `--model`.
SHAPES = {
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
}
MEASURED = ("tokens/s", "first token s", "preemptions", "seconds")
COLUMNS = ("variant", "tokens/s", "first token s", "preemptions", "most blocks", "seconds")


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Random tokens: what a step costs does not depend on them."""
    rng = random.Random(0)
    return [[rng.randrange(100, 1000) for _ in range(options.tokens)] for _ in range(options.requests)]


def in_vllm(options: argparse.Namespace) -> dict[str, Any]:
    """One variant in vLLM."""
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    from transformers import AutoConfig, LlamaConfig
    from vllm import LLM, SamplingParams

    shape, folder = SHAPES.get(options.model), options.model
    if shape is not None:
        folder = tempfile.mkdtemp()
        LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = 4 if options.dtype == "float32" else 2
    token = config.num_hidden_layers * config.num_key_value_heads * head * 2 * width
    tokens = options.requests * (options.tokens + options.new)
    setting = {"budget": options.budget, "policy": options.policy}
    if options.one == "prepared":
        setting |= {"policy": "calibrated", "allocator": "heads", "profile": str(options.profile.resolve())}
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="auto" if shape is None else "dummy",
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=options.tokens + options.new,
        max_num_seqs=options.requests,
        max_num_batched_tokens=options.chunk,
        kv_cache_memory_bytes=int(options.share * tokens * token),
        additional_config={"paged_eviction": setting} if options.one != "stock" else {},
        **({"block_size": options.block_size} if options.block_size else {}),
    )
    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    schedule, preempted, most = scheduler.schedule, 0, 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted, most
        output = schedule(*args, **kwargs)
        preempted += len(output.preempted_req_ids or ())
        most = max(most, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        return output

    scheduler.schedule = watched
    parameters = SamplingParams(max_tokens=options.new, temperature=0, detokenize=False, ignore_eos=True)
    clock = CLOCKS[options.clock]
    begin, first = clock(), {}
    for number, prompt in enumerate(prompts(options)):
        engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, parameters)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, clock() - begin)
    return row(options, clock() - begin, list(first.values()), preempted, f"{most} of {pool.num_gpu_blocks - 1}")


def in_own(options: argparse.Namespace) -> dict[str, Any]:
    """The continuous batching of this project: a budget of pages for each request, and memory for all that fit."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from hf_paged_eviction_serving import paged_batching

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    page = 32
    pages = int(options.share * options.requests * (options.tokens + options.new)) // page
    batching = ContinuousBatchingConfig(
        page_size=page, num_blocks=pages, max_batch_tokens=options.chunk, allow_block_sharing=False
    )
    chunk = options.chunk - options.requests
    with paged_batching(
        model, options.budget, policy=options.policy, prefill_chunk_size=chunk, allocator="uniform", prefix_cache=None
    ):
        generation = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=-1)
        manager = model.init_continuous_batching(generation, batching)
        manager.start()
        clock = CLOCKS[options.clock]
        begin, first, done = clock(), {}, 0
        for number, prompt in enumerate(prompts(options)):
            manager.add_request(prompt, f"r{number}", max_new_tokens=options.new, streaming=True)
        while done < options.requests:
            result = manager.get_result(timeout=1)
            if result is None:
                continue
            if result.generated_tokens:
                first.setdefault(result.request_id, clock() - begin)
            done += result.is_finished()
        seconds = clock() - begin
        manager.stop(block=True)
    return row(options, seconds, list(first.values()), 0, "")


def row(options: argparse.Namespace, seconds: float, first: list[float], preempted: int, most: str) -> dict[str, Any]:
    """What is measured."""
    made = options.requests * options.new
    return {
        "tokens/s": round(made / seconds, 2),
        "first token s": round(statistics.mean(first), 1),
        "preemptions": preempted,
        "most blocks": most,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Run the variants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--policy", default="keydiff")
    parser.add_argument("--share", type=float, default=1 / 3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--variants", help="default: all")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        found = in_own(options) if options.one == "own" else in_vllm(options)
        print(json.dumps(found))
        return
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here, so nothing was measured.")
        return
    rows: list[dict[str, Any]] = []
    known = [variant for variant in VARIANTS if variant != "prepared" or options.profile is not None]
    variants = options.variants.split(",") if options.variants else known
    if not set(variants) <= set(known):
        parser.error(f"--variants is some of {','.join(known)}, got {options.variants}; prepared needs --profile FILE.")
    for variant in variants * options.repeats:
        run = subprocess.run([sys.executable, *sys.argv, "--one", variant], capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(f"{variant}: {run.stderr[-2000:]}")
        rows.append({"variant": variant} | json.loads(run.stdout.strip().splitlines()[-1]))
        show(rows[-1])
        if options.output is not None:
            terms = vars(options) | {"output": None}
            options.output.write_text(json.dumps({"options": terms, "rows": rows}, indent=1, default=str) + "\n")
    for variant in variants:
        own = [row for row in rows if row["variant"] == variant]
        show(own[0] | {name: statistics.median(row[name] for row in own) for name in MEASURED})


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    print(" | ".join(f"{row[name]}" for name in COLUMNS), flush=True)


if __name__ == "__main__":
    main()

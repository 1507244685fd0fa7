"""Time of a decode step in few bits, as a ratio to the step without: `python benchmarks/few_bits.py --help`.

Two layers of 12 query and 4 KV heads of 64 with random weights on a CPU: one row, eager and compiled, and requests in
continuous batching, also in bfloat16. A block of steps without bits comes before and after each block of steps with
bits, in CPU time, the choice of victims included.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from statistics import median, quantiles
from typing import Any

import torch
from common import save
from peers_speed import Case, Run, fill
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval.bench.rows import interleaved, ratio
from hf_paged_eviction_serving import paged_batching

CONFIG = LlamaConfig(
    hidden_size=768,
    intermediate_size=2048,
    num_attention_heads=12,
    num_key_value_heads=4,
    num_hidden_layers=2,
    vocab_size=1024,
    max_position_embeddings=2**16,
)
BLOCK = 16


def run_of(model: Any, tokens: int, compiled: bool, bits: int | None, policy: str) -> Run:
    """A full cache, of which the first steps are done."""
    case = Case("token", "two layers", tokens, 1, "")
    cache = PagedEvictionCache(CONFIG, tokens, BLOCK, policy=policy, bits=bits, static=compiled)
    run = Run(model, case, fill(cache, model, case), tokens, "paged_eviction")
    run.step()
    if compiled:
        run.forward = torch.compile(model.forward, fullgraph=True, dynamic=False)
    for _ in range(2 * BLOCK - 1):
        run.step()
    return run


def of_a_block(run: Run) -> Callable[[], float]:
    """CPU seconds of so many steps."""
    return lambda: sum(run.step() for _ in range(BLOCK))


@torch.inference_mode()
def row(model: Any, tokens: int, compiled: bool, bits: int, policy: str, blocks: int) -> dict[str, Any]:
    """Milliseconds of a step with and without bits, and their ratio with its quartiles."""
    torch._dynamo.reset()
    without, with_bits = (of_a_block(run_of(model, tokens, compiled, count, policy)) for count in (None, bits))
    beside, own = [without()], []
    for _ in range(blocks):
        own.append(with_bits())
        beside.append(without())
    ratios = [2 * one / (less + more) for one, less, more in zip(own, beside, beside[1:], strict=False)]
    low, _, high = quantiles(ratios, n=4)
    return {
        "steps": "compiled" if compiled else "eager",
        "tokens": tokens,
        "bits": bits,
        "policy": policy,
        "ms": round(1e3 * median(own) / BLOCK, 3),
        "ms_without": round(1e3 * median(beside) / BLOCK, 3),
        "ratio": round(median(ratios), 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }


def serving(stack: ExitStack, requests: int, tokens: int, bits: int | None, dtype: torch.dtype) -> Callable[[], float]:
    """CPU seconds of a block of steps in which each of the requests, which are full, gets one token."""
    model = new_model(dtype)
    options = {"budget": tokens, "block_size": BLOCK, "policy": "paged_eviction", "bits": bits, "prefix_cache": None}
    stack.enter_context(paged_batching(model, prefill_chunk_size=tokens, **options))
    config = GenerationConfig(max_new_tokens=2**14, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(config)
    manager.current_batch = 0
    processor = manager.batch_processor = manager._create_batch_processor()
    for number in range(requests):  # out of step with each other
        prompt = torch.randint(CONFIG.vocab_size, (tokens + number,), generator=torch.manual_seed(number))
        manager.add_request(prompt.tolist(), request_id=str(number))

    def step() -> None:
        manager._generation_loop_body(processor, bootstrapping=False)

    live = processor.scheduler.bounded.requests
    while min((request.seen for request in live.values()), default=0) < tokens + requests + BLOCK:
        step()

    def block() -> float:
        begun = time.process_time()
        for _ in range(BLOCK):
            step()
        return time.process_time() - begun

    return block


@torch.inference_mode(False)
def served_row(tokens: int, bits: int, requests: int, blocks: int) -> dict[str, Any]:
    """Tokens per CPU second in pages of each kind, and the ratios of the times."""
    kinds = {"float32": (None, torch.float32), "bfloat16": (None, torch.bfloat16), "bits": (bits, torch.float32)}
    with ExitStack() as stack:
        runs = {name: serving(stack, requests, tokens, *kind) for name, kind in kinds.items()}
        times = interleaved(runs, blocks)
    made = requests * BLOCK
    return {
        "steps": "served",
        "requests": requests,
        "tokens": tokens,
        "bits": bits,
        "tokens_per_cpu_second": {name: round(made / median(seconds), 1) for name, seconds in times.items()},
        "ratio": {name: round(ratio(times["bits"], times[name]), 3) for name in ("float32", "bfloat16")},
    }


def new_model(dtype: torch.dtype = torch.float32) -> Any:
    """The same weights each time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--policy", default="paged_eviction")
    parser.add_argument("--blocks", type=int, default=16, help="of steps, each timed as one")
    parser.add_argument("--requests", default="8", help="live at once in continuous batching")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = new_model()
    sizes = [[int(size) for size in words.split(",")] for words in (options.tokens, options.bits)]
    rows = []
    for tokens, bits, compiled in product(*sizes, (False, True)):
        rows.append(row(model, tokens, compiled, bits, options.policy, options.blocks))
        print(rows[-1], flush=True)
    for tokens, bits, requests in product(*sizes, map(int, options.requests.split(","))):
        rows.append(served_row(tokens, bits, requests, options.blocks))
        print(rows[-1], flush=True)
    save("few_bits", {"settings": vars(options), "rows": rows})


if __name__ == "__main__":
    main()

"""Time of a decode step in few bits, as a ratio to the step without: `python benchmarks/few_bits.py --help`.

Two layers of 12 query and 4 KV heads of 64 with random weights, one row, float32, on a CPU. A step without bits comes
before and after each step with bits, in CPU time; ratios are of whole blocks, the choice of victims included.
"""

import argparse
from collections.abc import Callable
from itertools import product
from statistics import median, quantiles
from typing import Any

import torch
from common import save
from peers_speed import Case, Run, fill
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_paged_eviction import PagedEvictionCache

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--policy", default="paged_eviction")
    parser.add_argument("--blocks", type=int, default=16, help="of steps, each timed as one")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    sizes = ([int(size) for size in words.split(",")] for words in (options.tokens, options.bits))
    rows = []
    for tokens, bits, compiled in product(*sizes, (False, True)):
        rows.append(row(model, tokens, compiled, bits, options.policy, options.blocks))
        print(rows[-1], flush=True)
    save("few_bits", {"settings": vars(options), "rows": rows})


if __name__ == "__main__":
    main()

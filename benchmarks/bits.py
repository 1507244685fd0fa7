"""Time and memory of a decoded token at each precision: `python benchmarks/bits.py --help`.

What `paged-eviction bench --preset bits` measures, with a model of few layers, for the table in the documentation.
"""

import argparse

import torch
from common import save
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_paged_eviction_eval.bench.shapes import SHAPES
from hf_paged_eviction_eval.bench.steps.precision import BITS, WAYS, PrecisionSettings, measure_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="100m", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=2, help="of the model's")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="bits", help="of the results")
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--same-tokens", action="store_true", help="no caches of more tokens")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**{**SHAPES[options.model], "num_hidden_layers": options.layers})
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).to(device).eval()
    settings = PrecisionSettings(
        *(options.budget, options.steps, options.rounds, tuple(options.ways), tuple(options.bits)),
        more=not options.same_tokens,
    )
    save(
        options.name,
        {"settings": vars(options), "device": device, "dtype": str(dtype)} | measure_all(model, settings, print),
    )


if __name__ == "__main__":
    main()

"""Train a second model, smaller and made otherwise than the embedded one: `python -m training.second --help`.

For benchmarks that ask whether something found on the embedded model holds on another: two layers, as many KV heads as
query heads, another rotary base and another seed; the first lessons only, so that it knows prompts of a hundred tokens.
The tokenizer is the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from . import architecture
from . import tokenizer as tokenizers
from .corpus import Corpus, training_texts
from .export import export
from .lessons import LESSONS
from .train import study
from .trainer import Trainer

SHORT = LESSONS[:3]


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Two layers of full multi-head attention, a function of the seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        attention_bias=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    architecture.initialise(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from progress.pt in the output folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.train(training_texts())
    model = new_model(tokenizer, options.seed)
    trainer = Trainer(model, Corpus(tokenizer, options.seed), rate=2e-3)
    study(trainer, SHORT, options.output / "progress.pt", options.resume)
    export(model, tokenizer, options.output)


if __name__ == "__main__":
    main()

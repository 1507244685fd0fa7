"""Measure the embedded model with its full cache: `python -m training.measure --help`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged_eviction_eval.embedded import path
from hf_paged_eviction_eval.tasks import TASK_GROUPS, held_out_texts, make_samples

_WINDOW = 1024


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, task: str, length: int, count: int, seed: int, batch: int = 16) -> float:
    """Mean score of greedy answers on left-padded batches."""
    samples = make_samples(task, tokenizer, length, count, seed)
    scores = []
    for start in range(0, count, batch):
        part = samples[start : start + batch]
        inputs = tokenizer([sample.prompt for sample in part], return_tensors="pt", padding=True)
        new_tokens = max(sample.max_new_tokens for sample in part)
        output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores += [sample.score(text) for sample, text in zip(part, texts, strict=True)]
    return float(sum(scores) / len(scores))


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: dict[str, str]) -> tuple[float, float]:
    """Perplexity per token and bits per byte over windows that do not overlap."""
    total, tokens, size = 0.0, 0, 0
    for text in texts.values():
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        size += len(text.encode())
        for start in range(0, len(ids), _WINDOW):
            window = torch.tensor([[tokenizer.bos_token_id, *ids[start : start + _WINDOW]]])
            logits = model(input_ids=window).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
            tokens += window.shape[1] - 1
    return math.exp(total / tokens), total / math.log(2) / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=path())
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--tasks", nargs="+", default=TASK_GROUPS["suite"])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    local = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, use_safetensors=True, **local)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **local)
    print(f"| task | {' | '.join(map(str, arguments.lengths))} |")
    print("|---|" + "---|" * len(arguments.lengths))
    for task in arguments.tasks:
        cells = (
            f"{accuracy(model, tokenizer, task, length, arguments.count, arguments.seed):.3f}"
            for length in arguments.lengths
        )
        print(f"| {task} | {' | '.join(cells)} |", flush=True)
    tokens, bits = perplexity(model, tokenizer, held_out_texts())
    print(f"perplexity on held-out modules: {tokens:.2f} per token, {bits:.3f} bits per byte")


if __name__ == "__main__":
    main()

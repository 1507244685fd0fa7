"""Calibrate the embedded model: `python -m training.calibrate --help`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged_eviction.learned.calibration import Calibration, save_calibration
from hf_paged_eviction.preparing.fitting import fit
from hf_paged_eviction_eval.embedded import calibration_path, path

from .corpus import Corpus

_LENGTH, _LOAD = 1024, 24
_QUESTIONS, _TEXTS = 48, 24
#: Corpora are seeded apart from all samples; this one is not that of the training either.
_SEED = 1000


def windows(tokenizer: Any, seed: int = _SEED, questions: int = _QUESTIONS, texts: int = _TEXTS) -> list[Tensor]:
    """Windows like those of the training, of another seed: facts in filler with questions, and real text."""
    corpus = Corpus(tokenizer, seed)
    ids = [corpus.questions(_LENGTH, _LOAD).ids[:_LENGTH] for _ in range(questions)]
    ids += [corpus.text(_LENGTH).ids for _ in range(texts)]
    return [torch.tensor([each]) for each in ids]


def calibrate(model: Any, tokenizer: Any, seed: int = _SEED) -> Calibration:
    """The calibration that ships with the model, fitted anew."""
    return fit(model, windows(tokenizer, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=path())
    parser.add_argument("--output", type=Path, default=calibration_path())
    parser.add_argument("--seed", type=int, default=_SEED)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    local = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, use_safetensors=True, **local)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **local)
    calibration = calibrate(model, tokenizer, arguments.seed)
    save_calibration(calibration, arguments.output)
    print(f"Spearman on held-out windows by layer and KV head: {calibration.facts['held_out_spearman']}")


if __name__ == "__main__":
    main()

"""Fit the kernels of `fold(file=embedded)`: `python lab/training/embedded_fold.py --help`, with PYTHONPATH=.."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged_eviction_eval.embedded import path
from hf_paged_eviction_lab.fold import save_kernels
from hf_paged_eviction_lab.fold.fit import Plan, fit_kernels
from training.corpus import Corpus

_LENGTHS, _LOAD = (1024, 1024, 2048), 24
_QUESTIONS, _TEXTS = 48, 24
#: Corpora are seeded apart from all samples; this one is neither that of the training nor that of the calibration.
_SEED = 2000
PLAN = Plan("keydiff", (64, 128))


def windows(tokenizer: Any, seed: int = _SEED, questions: int = _QUESTIONS, texts: int = _TEXTS) -> list[Tensor]:
    """Windows like those of the training, of another seed: facts in filler with questions, and real text."""
    corpus = Corpus(tokenizer, seed)
    lengths = [_LENGTHS[at % len(_LENGTHS)] for at in range(questions + texts)]
    ids = [corpus.questions(length, _LOAD).ids[:length] for length in lengths[:questions]]
    ids += [corpus.text(length).ids for length in lengths[questions:]]
    return [torch.tensor([row]) for row in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=path())
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=_SEED)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    local = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, use_safetensors=True, **local)
    taught = windows(AutoTokenizer.from_pretrained(arguments.model, **local), arguments.seed)
    kernels = fit_kernels(model.eval(), taught, PLAN, lambda done, of: print(f"{done} of {of} steps", flush=True))
    print(kernels.facts["held_out_error"])
    save_kernels(kernels, arguments.output)


if __name__ == "__main__":
    main()

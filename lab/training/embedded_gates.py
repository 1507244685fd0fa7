"""Train the gates of the embedded model: `python lab/training/embedded_gates.py --help`, with PYTHONPATH=.."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged_eviction_eval.embedded import path
from hf_paged_eviction_lab.gates import save_gates
from hf_paged_eviction_lab.gates.fit import fit_gates
from hf_paged_eviction_lab.gates.training import Training
from training.calibrate import windows

#: Corpora are seeded apart from all samples; this one is neither that of the training nor of the calibration.
_SEED = 2000
_QUESTIONS, _TEXTS = 160, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=path())
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=_SEED)
    parser.add_argument("--questions", type=int, default=_QUESTIONS, help="windows with questions")
    parser.add_argument("--texts", type=int, default=_TEXTS, help="windows of real text")
    parser.add_argument("--target", default="attention", help="see `Training`")
    parser.add_argument("--units", type=int, default=Training.units)
    parser.add_argument("--epochs", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    local = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, use_safetensors=True, **local)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, **local)
    taught = windows(tokenizer, arguments.seed, arguments.questions, arguments.texts)
    gates = fit_gates(model, taught, Training(arguments.target, arguments.units, arguments.epochs))
    save_gates(gates, arguments.output)
    print(*(f"{name}: {value}" for name, value in gates.facts.items()), sep="\n")


if __name__ == "__main__":
    main()

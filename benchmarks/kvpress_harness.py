"""One of twelve passkeys in kvpress' own harness: its presses, and its `LUKVPress` with the budgets of our profile.

    python benchmarks/kvpress_files.py --model FOLDER --output results/kvpress

writes prompts, answers and budgets, where this package is installed. In an environment of kvpress, without it:

    git clone https://github.com/NVIDIA/kvpress && pip install 'transformers==5.2.0' kvpress==0.5.5 fire
    python benchmarks/kvpress_harness.py kvpress/evaluation --files results/kvpress --model FOLDER --name smollm2

The class that kvpress' `evaluate.py` runs loads the model, compresses a context before a question is read, generates
the answers and scores them as it does RULER's. A press keeps a share of the context's tokens; question and answer come
on top. Rows go to `benchmarks/results/kvpress_harness.jsonl`; what stands there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

KEPT = 1 / 4, 1 / 8
ROWS = Path(__file__).parent / "results" / "kvpress_harness.jsonl"
OURS = "lukv with our budgets, "


def harness(folder: Path) -> Any:
    """The module `evaluate.py` of kvpress, whatever other module has that name."""
    sys.path.insert(0, str(folder))
    spec = util.spec_from_file_location("kvpress_evaluate", folder / "evaluate.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder} has no evaluate.py: give the folder evaluation of a clone of kvpress")
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def add_our_budgets(registry: dict[str, Any], curve: Path) -> None:
    """Add presses that give each head the tokens of our profile, and choose them by scores of kvpress."""
    from kvpress import ExpectedAttentionPress, KeyDiffPress, LUKVPress

    for name, press in (("keydiff", KeyDiffPress()), ("expected_attention", ExpectedAttentionPress(epsilon=2e-2))):
        by_head = LUKVPress(press, sink=4, window=1)
        by_head._budget_curves = np.load(curve)
        registry[OURS + name] = by_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path, help="the folder evaluation of a clone of kvpress")
    parser.add_argument("--model", required=True, help="a folder in safetensors")
    parser.add_argument("--name", required=True, help="what the rows call it")
    parser.add_argument("--files", type=Path, required=True, help="the folder that kvpress_files.py wrote")
    options = parser.parse_args()
    torch.set_num_threads(1)
    evaluate = harness(options.evaluation)
    contexts = pd.read_parquet(options.files / "test.parquet")["context"].nunique()
    lines = [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()] if ROWS.exists() else []
    presses = [OURS + "keydiff", "keydiff", OURS + "expected_attention", "expected_attention", "snapkv"]
    add_our_budgets(evaluate.PRESS_REGISTRY, options.files / "curve.npy")
    evaluate.DATASET_REGISTRY["ruler"] = str(options.files)
    for press, kept in [("no_press", 1.0), *((press, kept) for press in presses for kept in KEPT)]:
        key = {"model": options.name, "press": press, "kept": kept, "contexts": contexts}
        if any(line.items() >= key.items() for line in lines):
            continue
        config = {"model": options.model, "device": "cpu", "model_kwargs": {"dtype": "bfloat16"}}
        config |= {"press_name": press, "compression_ratio": 1 - kept, "log_level": "ERROR"}
        runner = evaluate.EvaluationRunner(evaluate.EvaluationConfig(**config))
        runner._setup_press()
        runner._setup_model_pipeline()
        runner._load_and_prepare_dataset()
        runner._run_inference()
        score = evaluate.SCORER_REGISTRY["ruler"](runner.df)["niah_twelve"]["string_match"]
        row = {**key, "questions": len(runner.df), "right": score}
        print(row, flush=True)
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

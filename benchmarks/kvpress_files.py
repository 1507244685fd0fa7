"""Prompts, answers and budgets of heads for kvpress, which needs another transformers than this package.

    python benchmarks/kvpress_files.py --model FOLDER --output results/kvpress

writes `test.parquet`, one of twelve passkeys in the contexts of `memory_rows.py` in the form of kvpress' data sets,
and `curve.npy`, the budgets of the model's profile as kvpress' `LUKVPress` reads them. `kvpress_harness.py` runs them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from memory_rows import twelve_passkeys
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged_eviction import prepare
from hf_paged_eviction.learned.calibration import Calibration, load_calibration

ANSWER, NEW_TOKENS = "The passkey of the", 20
#: Exponent of the shares: scores of kvpress are weaker than those that the shares were learned with.
POWER = 1.5
#: Shares that are pruned, in percent, for which a curve has a table.
_PERCENT = range(1, 100)
#: Halvings of an interval, for a float32's precision.
_HALVINGS = 60


def passkeys(tokenizer: Any, count: int) -> pd.DataFrame:
    """Questions about `count` contexts, in the form that kvpress reads."""
    rows = []
    for index in range(count):
        context = twelve_passkeys(tokenizer, index)
        if context is None:
            raise SystemExit(f"There are {index} contexts, not {count}.")
        rows += [
            {"context": context[0], "question": question, "answer": [answer]} for question, _, answer in context[1]
        ]
    return pd.DataFrame(rows).assign(answer_prefix=ANSWER, task="niah_twelve", max_new_tokens=NEW_TOKENS)


def curve_of(calibration: Calibration, power: float = POWER) -> np.ndarray[Any, Any]:
    """`[99, layers, KV heads]` float32: the share of its tokens that each head loses if 1 to 99 % of all are pruned.
    Layers that do not evict lose nothing.

    Raises:
        ValueError: the profile has no budgets of heads, or its layers differ in their number of KV heads.
    """
    shares = calibration.shares
    if shares is None:
        raise ValueError("The profile has no budgets of heads: make it again with `prepare`.")
    layers, widths = [*shares.layers], {table.shape[1] for table in shares.layers.values()}
    if len(widths) != 1:
        raise ValueError("The layers of this model differ in their number of KV heads, which no curve can say.")
    curve = torch.zeros(len(_PERCENT), int(calibration.model.get("num_hidden_layers", max(layers) + 1)), *widths)
    for row, percent in enumerate(_PERCENT):
        share = 1 - percent / 100
        curve[row, layers] = (1 - _kept(torch.cat(shares.at(torch.tensor([share]))) ** power, share)).float()
    return curve.numpy()


def _kept(shares: Tensor, kept_share: float) -> Tensor:
    """The share of its tokens that each head keeps, `[layers, KV heads]`: proportional to `shares`, at most all, with
    the mean `kept_share`."""
    shares = shares.double() / shares.double().max()
    low, high = 0.0, 1 / float(shares.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if (middle * shares).clamp_max(1).mean() > kept_share else (middle, high)
    return (high * shares).clamp_max(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder in safetensors")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the two files")
    parser.add_argument("--contexts", type=int, default=8, help="each with four questions")
    options = parser.parse_args()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(options.model), AutoTokenizer.from_pretrained(options.model)
    options.output.mkdir(parents=True, exist_ok=True)
    passkeys(tokenizer, options.contexts).to_parquet(options.output / "test.parquet")
    np.save(options.output / "curve.npy", curve_of(load_calibration(prepare(model, tokenizer).path)))


if __name__ == "__main__":
    main()

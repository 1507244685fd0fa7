"""Which tokens kvpress keeps of one prompt of the embedded model, for `tests/policies/test_peers.py`.

`python benchmarks/peers.py`, in an environment of its own with kvpress 0.5.5 and transformers 5.2.0, writes
`tests/data/peers/kept.json` anew: for each press, layer and KV head the positions of the tokens that are kept, 160 of
640. The prompt stands in the file. Positions are found by the keys that are left, not by what a press says.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

#: The embedded model of this checkout: the package itself needs a newer transformers than kvpress.
MODEL = Path(__file__).parents[1] / "eval" / "embedded" / "model"
TARGET = Path(__file__).parents[1] / "tests" / "data" / "peers" / "kept.json"
KEPT = 160

#: As they are called in the file. Of the last, 628 of the 640 tokens compete: four whole chunks.
PRESSES = (
    "KnormPress",
    "KeyDiffPress",
    "SnapKVPress(window_size=32, kernel_size=5)",
    "TOVAPress",
    "LagKVPress(n_sink=4, lag_size=64)",
    "ObservedAttentionPress",
    "StreamingLLMPress(n_sink=4)",
    "ExpectedAttentionPress",
    "ExpectedAttentionPress(use_covariance=False, use_vnorm=False)",
    "CompactorPress",
    "CompactorPress(chunk_size=157)",
)


def main() -> None:
    ids: list[int] = json.loads(TARGET.read_text())["input_ids"]
    # One press asks for the weights of attention.
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager").eval()
    weights = MODEL / "model.safetensors"
    content = {
        "source": "made by benchmarks/peers.py with kvpress (Apache-2.0)",
        "kvpress": version("kvpress"),
        "transformers": version("transformers"),
        "model_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "kept_per_layer_and_head": KEPT,
        "input_ids": ids,
    }
    kept_by_press = {name: kept_by(model, ids, name) for name in PRESSES}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    presses = ",\n".join(f"  {json.dumps(name)}: {json.dumps(layers)}" for name, layers in kept_by_press.items())
    TARGET.write_text("{\n" + ",\n".join([*lines, f' "kept": {{\n{presses}\n }}']) + "\n}\n")
    print(f"written: {TARGET}")


def kept_by(model: Any, ids: list[int], name: str) -> list[list[list[int]]]:
    """`[layer][head]`, positions in order."""
    import kvpress

    kind, _, settings = name.removesuffix(")").partition("(")
    how = {
        key: json.loads(value.lower())
        for key, value in (setting.split("=") for setting in settings.split(", ") if setting)
    }
    press = getattr(kvpress, kind)(compression_ratio=1 - KEPT / len(ids), **how)
    compress, kept_positions = press.compress, []

    def watched(module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        left, left_values = compress(module, hidden_states, keys, values, *rest)
        same = (left[0, :, :, None] == keys[0, :, None]).all(-1)  # [heads, kept, tokens]
        if not (same.sum(-1) == 1).all():
            raise SystemExit("two tokens of a head have the same key: no telling which was kept")
        kept_positions.append(same.int().argmax(-1).sort(-1).values.tolist())
        return left, left_values

    press.compress = watched
    torch.manual_seed(0)  # of the sketch
    with torch.no_grad(), press(model):
        model(torch.tensor([ids]), past_key_values=DynamicCache())
    return kept_positions


if __name__ == "__main__":
    main()

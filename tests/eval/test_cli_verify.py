"""`paged-eviction verify` as a person uses it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import invoking
from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction_eval.models import verifying


def run(*arguments: object, status: int = 0) -> Any:
    return invoking.run("verify", *arguments, status=status, columns=80)


def test_thorough_and_short(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thorough one stands for itself in the tests of `verify`."""
    output = tmp_path / "verified.json"
    result = run("--model", model_folder, "--device", "cpu", "--output", output)
    assert result.stdout.startswith("LlamaForCausalLM, float32 on cpu: 6 exact\n")
    assert "6/6 checks" in result.stderr and "--thorough" in result.stderr
    written = json.loads(output.read_text("utf-8"))
    assert written["ok"] and len(written["checks"]) == 6
    assert {check["outcome"] for check in written["checks"]} == {"exact"}
    short, asked = verifying.verify, list[bool]()

    def verify(model: Any, *, thorough: bool, **how: Any) -> Any:
        asked.append(thorough)
        return short(model, thorough=False, **how)

    monkeypatch.setattr(verifying, "verify", verify)
    assert "--thorough" not in run("--model", model_folder, "--device", "cpu", "--thorough").stderr
    assert asked == [True]


def test_a_wrong_cache_is_exit_status_1(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagedLayer.get_mask_sizes
    monkeypatch.setattr(PagedLayer, "get_mask_sizes", lambda self, count: (right(self, count)[0], 0))
    output = tmp_path / "verified.json"
    result = run("--model", model_folder, "--device", "cpu", "--output", output, status=1)
    assert " WRONG, " in result.stdout.splitlines()[0]
    assert not json.loads(output.read_text("utf-8"))["ok"]


def test_a_configuration_without_weights_gets_random_ones(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(vocab_size=300, **sizes).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    result = run("--model", tmp_path, "--device", "cpu", "--attn-implementation", "eager")
    assert "holds no weights: random ones are used" in result.stderr
    assert "  eager  " in result.stdout and "  sdpa  " not in result.stdout
    assert torch.equal(before, torch.get_rng_state())

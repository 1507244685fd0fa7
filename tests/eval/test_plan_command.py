"""`paged-eviction plan` finds the profile of a folder by weights that it does not load."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import invoking
from calibrations import drawn_score
from hf_paged_eviction import weights_digest
from hf_paged_eviction.integration.weights import registered_digest
from hf_paged_eviction.learned.calibration import Calibration, fingerprint, save_calibration
from hf_paged_eviction.learned.lookup import profile_path
from hf_paged_eviction.learned.measured import BYTES, RANDOM, Measured, Row
from hf_paged_eviction_eval.models.files import register_files


def run(*arguments: object) -> Any:
    return invoking.run("plan", "--context", "512", *arguments)


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """A model with a profile on this machine."""
    model.save_pretrained(tmp_path / "model", max_shard_size="100kB")
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 1
    rows = [Row("keydiff", "uniform", 4, BYTES, 0.25, {"text": [0.0625]})]
    rows += [replace(rows[0], policy=RANDOM, bits=None)]
    digest = weights_digest(model)
    draw = torch.Generator().manual_seed(0)
    layers = {index: drawn_score(2, 8, draw) for index in range(2)}
    measured = Measured(tuple(rows), "float32")
    fitted = Calibration(layers, {**fingerprint(model.config), "weights": digest}, measured=measured)
    profile_path(digest).parent.mkdir(parents=True, exist_ok=True)
    save_calibration(fitted, profile_path(digest))
    return tmp_path / "model"


def test_it_finds_the_profile_of_a_folder(folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    result = run("--model", folder)
    assert "0.062 ?" in result.stdout
    assert str(profile_path(weights_digest(model))) in result.stdout and not result.stderr


def test_it_says_why_there_are_no_losses(folder: Path) -> None:
    def said() -> str:
        return " ".join(run("--model", folder).stderr.split())

    for file in folder.glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    assert "this machine has no profile of the weights in" in said() and "paged-eviction prepare --model" in said()
    next(folder.glob("*.safetensors")).write_bytes(b"no tensors")
    assert "was not looked for: its files cannot be read" in said()
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}), "utf-8")
    assert "no profile of the weights in" in said(), "no profile has this shape, so the files are not read"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_is_that_of_the_loaded_model(model: Any, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    config = type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": tied, "dtype": dtype})
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = type(loaded.config).from_pretrained(tmp_path)
    assert register_files(tmp_path, config) == ""
    assert registered_digest(config) == weights_digest(loaded)


def test_what_only_loading_tells_is_not_guessed(tmp_path: Path, model: Any) -> None:
    assert "no model.safetensors" in register_files(tmp_path, model.config)
    (tmp_path / "adapter_config.json").write_text("{}", "utf-8")
    assert "adapter" in register_files(tmp_path, model.config)
    quantised = type(model.config)(quantization_config={"quant_method": "gptq"})
    assert "quantised" in register_files(tmp_path, quantised)

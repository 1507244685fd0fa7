"""Nothing that is read is run: code beside a model or a data set, pickles, YAML tags."""

from __future__ import annotations

import json
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, dynamic_module_utils

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.calibration import load_calibration
from hf_paged_eviction_eval import models
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.longbench.sources import dataset_rows
from hf_paged_eviction_eval.settings import TaskSettings


class Bomb:
    """Leaves a file where it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that foreign code would make."""
    return tmp_path / "mark"


@pytest.fixture
def own_code(tmp_path: Path, mark: Path) -> Path:
    """A model and a tokenizer whose folder brings their classes."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mystery.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig):\n    model_type = 'mystery'\n"
    )
    classes = {
        "AutoConfig": "mystery.Config",
        "AutoModelForCausalLM": "mystery.LlamaForCausalLM",
        "AutoTokenizer": ["mystery.PreTrainedTokenizerFast", None],
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "mystery", "auto_map": classes}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes, "tokenizer_class": "Mystery"}))
    return folder


@pytest.mark.parametrize("load", [models.load, models.load_config, models.load_tokenizer])
def test_code_of_a_model_is_not_run(load: Any, own_code: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(mark.parent / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match=r"trust_remote_code|custom code"):
        load(TaskSettings(policies=(), budgets=("full",), tasks=("passkey",), model=str(own_code)))
    assert not mark.exists()
    AutoConfig.from_pretrained(own_code, trust_remote_code=True)
    assert mark.exists(), "the code does nothing, so that this test says nothing"


def test_a_pickle_is_no_calibration(tmp_path: Path, mark: Path) -> None:
    plain, weights = tmp_path / "plain.safetensors", tmp_path / "weights.safetensors"
    plain.write_bytes(pickle.dumps(Bomb(mark)))
    torch.save(Bomb(mark), weights)
    for path in (plain, weights):
        with pytest.raises(ValueError, match="Cannot use the calibration"):
            load_calibration(path)
    assert not mark.exists()
    pickle.loads(plain.read_bytes())
    assert mark.exists(), "the pickle does nothing, so that this test says nothing"


def test_a_loading_script_is_not_run(tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "script.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    with pytest.raises(UserError, match="cannot load the dataset"):
        dataset_rows(str(folder), None, "test", None)
    assert not mark.exists()


def test_a_cache_at_work_opens_no_connection(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    cache = PagedEvictionCache(model.config, budget=48, policy="keydiff")
    ids = torch.arange(60).view(1, 60)
    model.generate(ids, past_key_values=cache, max_new_tokens=4, eos_token_id=None)
    assert cache.stats().evicted_tokens > 0

"""Nothing that is read is run: code beside a model or a data set, pickles, YAML tags."""

import json
import marshal
import pickle
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils

from asking import asked
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.learned.calibration import load_calibration
from hf_paged_eviction_eval.data.sources import dataset_rows
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.metrics import chinese
from hf_paged_eviction_eval.models import loading as models
from invoking import run
from processes import meta_of


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
def own_code(tmp_path: Path, model_folder: str, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and a tokenizer that work, and whose folder brings their classes."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "mystery.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig):\n    model_type = 'mystery'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
        "class Words(PreTrainedTokenizerFast):\n    pass\n"
    )
    classes = {"AutoConfig": "mystery.Config", "AutoModelForCausalLM": "mystery.Model"}
    change(folder / "config.json", model_type="mystery", auto_map=classes)
    words = {"AutoTokenizer": [None, "mystery.Words"]}
    change(folder / "tokenizer_config.json", tokenizer_class="Words", auto_map=words)
    return folder


def change(file: Path, **values: Any) -> None:
    """Replace values in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), "utf-8")


COMMANDS = {
    "eval": "eval --workers 1 --tasks passkey --length 200 --limit 1 --policies recency --budgets 64 --output {}/out",
    "texts": "eval --workers 1 --text {}/text --length 100 --policies recency --budgets 64 --output {}/out",
    "prepare": "prepare --text {}/text --output {}/it.safetensors",
    "bench": "bench --variants floor --contexts 64 --budgets 64 --steps 16 --rounds 1 --output {}/out",
    "verify": "verify",
}


def test_a_configuration_without_weights_runs_no_code_either(own_code: Path, mark: Path) -> None:
    (own_code / "model.safetensors").unlink()
    words = ("verify", "--device", "cpu", "--model", own_code)
    assert "--trust-remote-code" in run(*words, stdin="1\ny\nyes\n", status=2).output
    assert not mark.exists()
    run(*words, "--trust-remote-code")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_takes_its_input_for_consent(command: str, own_code: Path, mark: Path, tmp_path: Path) -> None:
    """transformers would ask whether to run the code, and read the answer from the pipe."""
    (tmp_path / "text").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    words = f"{command.replace('{}', str(tmp_path))} --device cpu --model {own_code}".split()
    assert "--trust-remote-code" in run(*words, stdin="1\ny\nyes\n", status=2).output
    assert not mark.exists()
    said = run(*words, "--trust-remote-code", stdin="1\n", status=2 if command.startswith("prepare") else 0).output
    assert ("no difference" in said) == command.startswith("prepare")  # the weights are random
    assert mark.exists()


def test_code_of_a_tokenizer_alone_is_run_on_request_only(model_folder: str, own_code: Path, mark: Path) -> None:
    settings = asked(model=model_folder, tokenizer=str(own_code))
    with pytest.raises(UserError, match=r"tokenizer of .*--trust-remote-code"):
        models.load(settings)
    # A class that transformers knows itself is taken instead.
    shutil.copy(Path(model_folder) / "config.json", own_code)
    with suppress(UserError):
        models.load_tokenizer(settings)
    assert not mark.exists()
    models.load(settings.but(trust_remote_code=True))
    assert mark.exists()


def test_consent_is_a_setting_of_the_run(model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "wish.yaml").write_text(f"trust-remote-code: true\nmodel: {model_folder}\n")
    words = f"{COMMANDS['eval'].replace('{}', str(tmp_path))} --device cpu --config {tmp_path}/wish.yaml"
    run(*words.split())
    settings = meta_of(tmp_path / "out")["settings"]
    assert settings["trust_remote_code"] is True and settings["allow_pickle"] is False
    assert "trust-remote-code: true" in (tmp_path / "out" / "run.yaml").read_text("utf-8")


def test_pickled_weights_are_read_on_request_only(model_folder: str, model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(model_folder, folder)
    (folder / "model.safetensors").unlink()
    settings = asked(model=str(folder), dtype="float32")
    with pytest.raises(UserError, match="damaged or incomplete"):
        models.load(settings)  # no weights at all
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"weights.*safetensors"):
        models.load(settings)
    loaded = models.load(settings.but(allow_pickle=True))[0]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.float())


def test_a_pickled_adapter_is_read_on_request_only(model_folder: str, mark: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapted"
    shutil.copytree(model_folder, folder)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    settings = asked(model=str(folder))
    with pytest.raises(UserError, match="adapter"):
        models.load_model(settings)
    assert not mark.exists()


def test_an_allowed_pickle_holds_tensors_only(model_folder: str, tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(model_folder, folder)
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="more than tensors"):
        models.load(asked(model=str(folder), allow_pickle=True))
    assert not mark.exists()


def test_words_planted_for_jieba_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jieba", reason="the extra `zh` is not installed")
    planted = {"北": 1, "北京": 0, "北京大": 10**9, "学": 1}
    (tmp_path / "jieba.cache").write_bytes(marshal.dumps((planted, 10**9)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    chinese._tokenizer.cache_clear()
    assert chinese.cut("北京大学") == ["北京大学"]
    assert [path.name for path in tmp_path.iterdir()] == ["jieba.cache"]


def test_a_pickle_is_no_calibration(tmp_path: Path, mark: Path) -> None:
    plain, weights = tmp_path / "plain.safetensors", tmp_path / "weights.safetensors"
    plain.write_bytes(pickle.dumps(Bomb(mark)))
    torch.save(Bomb(mark), weights)
    for path in (plain, weights):
        with pytest.raises(ValueError, match=r"Cannot use the profile .*not a safetensors file"):
            load_calibration(path)
    assert not mark.exists()
    pickle.loads(plain.read_bytes())
    assert mark.exists(), "the pickle does nothing, so that this test says nothing"


def test_a_loading_script_is_not_run(tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "script.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    with pytest.raises(UserError, match=r"load.*dataset"):
        dataset_rows(f"datasets:{folder}::test")
    assert not mark.exists()


def test_a_cache_at_work_opens_no_connection(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    cache = PagedEvictionCache(model.config, budget=48, policy="keydiff")
    ids = torch.arange(60).view(1, 60)
    model.generate(ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=4, eos_token_id=None)
    assert cache.stats().evicted_tokens > 0

"""A model that is one GGUF file becomes a folder, once; the commands name the way."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

from asking import asked
from gguf_files import HEADS, KV_HEADS, LAYERS, TEMPLATE, WIDTH, write_gguf
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models import loading as models
from scripts import load as load_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gguf() -> Any:
    return load_script(BENCHMARKS / "gguf_file.py")


def test_a_file_becomes_a_folder_once(gguf: Any, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    folder = gguf.convert(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", "tiny.gguf"]
    model, tokenizer = models.load(asked(model=str(folder)))
    config = model.config
    shape = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    assert shape == (LAYERS, WIDTH, HEADS, KV_HEADS)
    assert tokenizer.decode(tokenizer("Any text: ä", add_special_tokens=False).input_ids) == "Any text: ä"
    assert tokenizer.chat_template == TEMPLATE
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits)
    (folder / "config.json").write_text(json.dumps({"own": 1}))
    assert gguf.convert(file) == folder and "own" in (folder / "config.json").read_text()


@pytest.mark.parametrize("begins", [True, False])
def test_what_transformers_gets_wrong_of_a_tokenizer_is_mended(
    gguf: Any, begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, begins=begins)
    read = AutoTokenizer.from_pretrained

    def as_older_releases_do(*args: Any, **kwargs: Any) -> Any:
        tokenizer = read(*args, **kwargs)
        tokenizer.eos_token = "<s>"
        tokenizer.add_bos_token = not begins
        return tokenizer

    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", as_older_releases_do)
        folder = gguf.convert(file)
    tokenizer = models.load_tokenizer(asked(model=str(folder)))
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab").input_ids) == ["<s>"] * begins + ["ab"]


def test_a_tokenizer_that_cuts_words_of_its_vocabulary_is_refused(gguf: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", merges=["a b", "b c"])
    with pytest.raises(gguf.FileError, match=r"1.*1.*5\.19"):
        gguf.convert(tmp_path / "tiny.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_what_is_missing_is_named(gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gguf.FileError, match=r"none\.gguf.*no such file"):
        gguf.convert(tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, but nothing behind it")
    with pytest.raises(gguf.FileError, match="cannot be read"):
        gguf.convert(broken)
    monkeypatch.setattr(gguf, "is_gguf_available", lambda: False)
    with pytest.raises(gguf.FileError, match=r"pip install 'hf_paged_eviction\[gguf\]'"):
        gguf.convert(broken)


@pytest.mark.parametrize("load", [models.load, models.load_config, models.load_tokenizer])
def test_commands_name_the_way(load: Any) -> None:
    with pytest.raises(UserError, match=r"fetch_models\.py a\.gguf"):
        load(asked(model="a.gguf"))


def test_the_reader_is_asked_for_before_anything_is_fetched(
    gguf: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetching = load_script(BENCHMARKS / "fetch_models.py")
    monkeypatch.setattr(fetching, "fetch", lambda *_: pytest.fail("fetched"))
    monkeypatch.setitem(sys.modules, "gguf_file", gguf)
    monkeypatch.setattr(gguf, "is_gguf_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["fetch_models.py", "smollm2"])
    with pytest.raises(SystemExit, match=r"\[gguf\]"):
        fetching.main()


def test_only_marks_of_the_file_are_forgotten(gguf: Any) -> None:
    plain = SimpleNamespace(config=SimpleNamespace(hidden_size=3))
    gguf.forget_quantisation(plain)
    assert plain.config.hidden_size == 3 and plain.hf_quantizer is None

"""A model that is one GGUF file loads everywhere a folder does."""

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
from hf_paged_eviction_eval.models import gguf
from hf_paged_eviction_eval.models import loading as models
from invoking import run
from processes import raw_rows


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def test_model_configuration_and_tokenizer_come_from_the_file(file: Path, tmp_path: Path) -> None:
    model, tokenizer = models.load(asked(model=str(file)))
    config = models.load_config(asked(model=str(file)))
    for one in (model.config, config):
        shape = one.num_hidden_layers, one.hidden_size, one.num_attention_heads, one.num_key_value_heads
        assert shape == (LAYERS, WIDTH, HEADS, KV_HEADS)
    assert tokenizer.decode(tokenizer("Any text: ä", add_special_tokens=False).input_ids) == "Any text: ä"
    assert tokenizer.chat_template == TEMPLATE
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    # An ordinary model from then on: it can be saved, and says the same.
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_a_command_takes_the_file_as_model_and_as_tokenizer(file: Path, tmp_path: Path) -> None:
    words = f"eval --model {file} --tokenizer {file} --output {tmp_path} --tasks passkey --limit 1 --length 300"
    run(*words.split(), "--budgets", "25%,full", "--policies", "keydiff")
    assert len(raw_rows(tmp_path)) == 2


def test_the_other_harness_takes_it_too(file: Path) -> None:
    harness = pytest.importorskip("hf_paged_eviction_eval.lm_eval.model", reason="the extra `lm-eval` is missing")
    assert harness.PagedEvictionLM(str(file), device="cpu", budget=32, block_size=4).model.config.hidden_size == WIDTH


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("harness", [False, True])
def test_what_transformers_gets_wrong_of_a_tokenizer_is_mended(
    begins: bool, harness: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, begins=begins)
    read = AutoTokenizer.from_pretrained

    def as_older_releases_do(*args: Any, **kwargs: Any) -> Any:
        tokenizer = read(*args, **kwargs)
        tokenizer.eos_token = "<s>"
        tokenizer.add_bos_token = not begins
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", as_older_releases_do)
    if harness:
        lm_eval = pytest.importorskip("hf_paged_eviction_eval.lm_eval.model", reason="the extra `lm-eval` is missing")
        tokenizer = lm_eval.PagedEvictionLM(str(file), device="cpu", budget=32, block_size=4).tokenizer
    else:
        tokenizer = models.load_tokenizer(asked(model=str(file)))
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab").input_ids) == ["<s>"] * begins + ["ab"]


def test_a_tokenizer_that_cuts_words_of_its_vocabulary_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", merges=["a b", "b c"])
    with pytest.raises(UserError, match=r"1.*1.*FOLDER"):
        models.load_tokenizer(asked(model=str(tmp_path / "tiny.gguf")))


@pytest.mark.parametrize("load", [models.load, models.load_config, models.load_tokenizer])
def test_what_is_missing_is_named(load: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"none\.gguf.*no such file"):
        load(asked(model=str(file.parent / "none.gguf")))
    broken = file.parent / "broken.gguf"
    broken.write_bytes(b"GGUF, but nothing behind it")
    with pytest.raises(UserError, match="cannot load"):
        load(asked(model=str(broken)))
    monkeypatch.setattr(gguf, "is_gguf_available", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'hf_paged_eviction\[gguf\]'"):
        load(asked(model=str(file)))


def test_only_marks_of_the_file_are_forgotten() -> None:
    plain = SimpleNamespace(config=SimpleNamespace(hidden_size=3))
    gguf.forget_gguf(plain)
    assert plain.config.hidden_size == 3 and plain.hf_quantizer is None

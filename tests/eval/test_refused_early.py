"""What cannot work is said at once, in a line: before a model is read, or an answer is computed and lost."""

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from hf_paged_eviction_eval import embedded, hub
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models import loading
from hf_paged_eviction_eval.models.device import check_device
from hf_paged_eviction_eval.options.settings import Settings
from hf_paged_eviction_eval.running import evaluation
from invoking import run
from processes import raw_rows

SMALL = "--tasks kv_recall --length 256 --limit 1 --policies recency --workers 1 --device cpu".split()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The embedded model under a path of its own."""
    return shutil.copytree(embedded.path(), tmp_path / "model")


def refused(*words: object) -> str:
    result = run(*map(str, words), status=2)
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("module", ["math_verify", "jieba"])
def test_a_package_of_a_scorer_is_missed_before_a_model_is_read(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_paged_eviction_eval.metrics import chinese

    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(evaluation, "load_model", lambda *_, **__: pytest.fail("loaded"))
    chinese._tokenizer.cache_clear()
    (tmp_path / "math500.jsonl").write_text(json.dumps({"problem": "1+1?", "answer": "2", "unique_id": "a"}) + "\n")
    record = {"input": "?", "context": "x", "answers": ["天"], "all_classes": None, "length": 5, "_id": "a"}
    record |= {"dataset": "multifieldqa_zh", "language": "zh"}
    (tmp_path / "multifieldqa_zh.jsonl").write_text(json.dumps(record) + "\n")
    task = {"math_verify": "math500", "jieba": "multifieldqa_zh"}[module]
    words = f"eval --tasks {task} --data-dir {tmp_path} --policies recency --budgets 64 --device cpu".split()
    words += ["--max-new-tokens", "8"] if task == "math500" else []
    assert f"need {module}" in refused(*words, "--output", tmp_path / "out")


def test_a_tokenizer_that_makes_no_token(copy: Path, tmp_path: Path) -> None:
    """Generated prompts would be filled up for ever."""
    words = ["--model", copy, "--budgets", "64", "--output", tmp_path / "out"]
    for empty, message in (
        (models.BPE(), "makes no token of a text"),
        (models.WordLevel({"x": 0}), "cannot read a text"),
    ):
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(empty)).save_pretrained(copy)
        assert message in refused("eval", *SMALL, *words)


def test_a_tokenizer_of_a_larger_vocabulary(copy: Path, tmp_path: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    weights = load_file(copy / "model.safetensors")
    few = 64
    for name, tensor in weights.items():
        if tensor.shape[0] == config["vocab_size"]:
            weights[name] = tensor[:few].clone()
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": few}))
    text = tmp_path / "text.txt"
    text.write_text("The code of maple is amber. " * 40)
    for words in (["eval", *SMALL], ["eval", "--text", text, "--workers", 1, "--policies", "recency"]):
        message = refused(*words, "--model", copy, "--budgets", "64", "--output", tmp_path / "out")
        assert f"but the model '{copy}' has only {few}" in message and "--tokenizer" in message


@pytest.mark.filterwarnings("ignore:No layer of this mamba model can evict")
@pytest.mark.parametrize("budgets", ["64", "full"])
def test_a_model_without_keys_and_values(copy: Path, tmp_path: Path, budgets: str) -> None:
    config = MambaConfig(vocab_size=4096, hidden_size=16, num_hidden_layers=1, state_size=4)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (copy / name).unlink()
    MambaForCausalLM(config).save_pretrained(copy)
    message = refused("eval", *SMALL, "--model", copy, "--budgets", budgets, "--output", tmp_path / "out")
    assert "mamba" in message and len(message) < 400


def test_a_name_that_nobody_knows_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(hub, "reachable", lambda url: False)
    started = time.monotonic()
    settings = Settings(model="meta/no-such-lama", policies=(), budgets=("full",))
    for load in (loading.load_config, loading.load_tokenizer, loading.load_model):
        with pytest.raises(UserError) as error:
            load(settings)
        message = "cannot fetch the model 'meta/no-such-lama': https://huggingface.co cannot be reached; give a folder"
        assert str(error.value).startswith(message)
    assert time.monotonic() - started < 5
    monkeypatch.setattr(hub, "is_offline", lambda: True)
    with pytest.raises(UserError, match="not in the cache, and HF_HUB_OFFLINE is set"):
        loading.load_config(settings)
    with pytest.raises(UserError, match="cannot load"):  # no name of a repository, as ever
        loading.load_config(settings.but(model="no/such/model/here"))


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


def cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 9)


GPTQ = {"quant_method": "gptq", "bits": 4}
#: What is done to a folder, what is then loaded from it, and what the error says: the reason and the way out.
DAMAGED = {
    "unknown type": (change_config(model_type="llama9"), "model", "`llama9`", "install a newer release"),
    "no decoder": (change_config(model_type="t5"), "model", "no causal language model", "a model that generates text"),
    "shapes": (change_config(hidden_size=256), "model", "shapes of its weights", "download them again"),
    "activation": (change_config(hidden_act="nope"), "model", "KeyError: 'nope'", "download them again"),
    "field": (change_config(num_attention_heads="x"), "config", "expected int, got str", "download them again"),
    "package": (change_config(quantization_config=GPTQ), "model", "GPTQ quantized", "install the missing package"),
    "cut weights": (cut_weights, "model", "deserializing header", "download them again"),
    "no tokenizer": (remove_tokenizer, "tokenizer", "backend tokenizer", "--tokenizer"),
    "cut tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer", "line 1", "--tokenizer"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_model_that_is_damaged_or_of_another_kind(case: str, copy: Path) -> None:
    """One line, with the reason and the way out; transformers has several, or an error of some other library."""
    damage, part, reason, remedy = DAMAGED[case]
    damage(copy)
    settings = Settings(model=str(copy), policies=(), budgets=("full",))
    with pytest.raises(UserError, match="cannot load") as error:
        getattr(loading, f"load_{part}")(settings)
    message = str(error.value)
    assert reason in message and remedy in message
    assert "\n" not in message and len(message) < 600 + 2 * len(str(copy))


@pytest.mark.parametrize("device", ["gpu", "GPU:0", "meta", "hpu", ""])
def test_a_device_that_nobody_has(device: str) -> None:
    with pytest.raises(UserError) as error:
        check_device(device)
    assert str(error.value) == f"device {device!r} cannot be used: write cuda, cpu or mps"


@pytest.mark.parametrize("norm", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.all_cases), 1e30])
def test_losses_that_are_no_numbers(copy: Path, tmp_path: Path, norm: float) -> None:
    """Or too large: the rows stay, and report, table and plot say what there is."""
    weights = load_file(copy / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in weights.items()}
    weights["model.norm.weight"][:] = norm
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text("utf-8")[:2400])
    words = f"eval --text {text} --model {copy} --policies recency --budgets 64,full --length 400 --device cpu"
    for _ in range(2):
        output = " ".join(run(*words.split(), "--agreement", "--output", str(tmp_path / "out")).output.split())
        assert "recency at 64: some losses are no numbers or too large" in output.replace("full at full, ", "")
    assert len(raw_rows(tmp_path / "out")) == 2
    assert json.loads((tmp_path / "out" / "summary.json").read_text())[0]["perplexity"] is None
    output = " ".join(run("report", str(tmp_path / "out")).output.split())
    assert "written to" in output and "damaged" not in output


def test_a_budget_that_holds_all_is_marked(tmp_path: Path) -> None:
    words = [*SMALL, "--output", str(tmp_path / "out")]
    output = run("eval", *words, "--budgets", "64,1024").output
    rows = {line.split()[0]: line for line in output.splitlines() if " recency " in line}
    assert "*" in rows["1024"] and "*" not in rows["64"] and "* nothing was evicted" in output
    assert "*" not in run("eval", *words, "--budgets", "64").output
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text("utf-8")[:1600])
    words = f"eval --text {text} --length 200 --policies recency --budgets 64,256 --workers 1 --output {tmp_path / 't'}"
    assert "* nothing was evicted" in run(*words.split()).output


def test_answers_of_the_other_harness_belong_to_one_cache() -> None:
    from hf_paged_eviction_eval.lm_eval.cache_settings import own_answers

    answers: dict[str, Any] = {}
    own_answers(answers, {"budget": "512"})
    answers["a question"] = 1
    own_answers(answers, {"budget": "512"})
    with pytest.raises(UserError, match=r"settings.*'512'.*'48'"):
        own_answers(answers, {"budget": "48"})
    with pytest.raises(UserError, match=r"says.*which"):
        own_answers({"a question": 1}, {"budget": "48"})

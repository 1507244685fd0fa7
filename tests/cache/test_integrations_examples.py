"""Every script in `examples/` runs, says the right thing and stays short."""

import re
import runpy
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils

from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, and with no copies of code in the user's cache."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)


def run(name: str) -> dict[str, Any]:
    """The names that the script leaves behind."""
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def new_text(records: list[Any]) -> list[str]:
    """What a pipeline generated, without spaces around it."""
    records = [record[0] if isinstance(record, list) else record for record in records]
    return [record["generated_text"].strip() for record in records]


def right(names: dict[str, Any], answer: str) -> bool:
    return answer.startswith(f" {names['sample'].answers[0]}")


def test_pipelines() -> None:
    names = run("pipelines")
    answers = [sample.answers[0] for sample in names["samples"]]
    assert new_text(names["batch"]) == new_text(names["many"]) == answers
    assert new_text(names["one"]) == new_text(names["chat"]) == answers[:1]


def test_streaming() -> None:
    names = run("streaming")
    model, inputs = names["model"], names["inputs"]
    cache = type(names["cache"])(model.config, budget=128, policy="snapkv")
    whole = model.generate(**inputs, **{CACHE_ARGUMENT: cache}, max_new_tokens=40)[0, inputs.input_ids.shape[1] :]
    assert "".join(names["pieces"]) == names["tokenizer"].decode(whole)
    assert names["cache"].stats() == cache.stats()
    assert names["cache"].stats().largest_held == 128


def test_generation_config() -> None:
    names = run("generation_config")
    assert right(names, names["answer"])
    assert names["cache"].stats().largest_held == 256


def test_saved_context() -> None:
    names = run("saved_context")
    start = names["inputs"]["input_ids"].shape[1]
    answers = [names["tokenizer"].decode(row[start:]) for row in names["output"]]
    assert len(answers) == 2
    assert all(right(names, answer) for answer in answers)
    assert names["cache"].budget == 128


def test_offloaded() -> None:
    pytest.importorskip("accelerate")
    names = run("offloaded")
    assert right(names, names["answer"])
    assert {str(weight.device) for weight in names["model"].parameters()} >= {"meta"}
    assert names["cache"].stats().largest_held == 128


def test_trainer() -> None:
    pytest.importorskip("accelerate")
    names = run("trainer")
    wanted = [sample.answers[0] for sample in names["samples"]]
    assert all(answer.startswith(f" {word}") for answer, word in zip(names["answers"], wanted, strict=True))
    assert names["trainer"].state.global_step == 1


def test_lora() -> None:
    pytest.importorskip("peft")
    names = run("lora")
    assert names["off"] == names["base"]
    assert names["merged"] == names["first"]
    assert len({names["base"], names["first"], names["second"]}) == 3


def test_quantised() -> None:
    pytest.importorskip("bitsandbytes")
    names = run("quantised")
    assert right(names, names["answer"])
    assert names["cache"].layers[0].keys.dtype == torch.bfloat16
    assert any("4bit" in type(module).__name__ for module in names["model"].modules())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_short_and_run_here(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (150 if path.stem == "chat" else 40)
    assert f"test_{path.stem}" in globals()


def test_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Three layers are drawn above each answer; a second turn is read behind the first, and answered again."""
    folder = str(embedded.path())
    monkeypatch.setattr(sys, "argv", f"chat.py --model {folder} --budget 64 --max-new-tokens 4".split())
    question = "What is the code of maple? The code of maple is"
    lines = [f"The code of maple is amber. {question}", "", "The sky is blue. " * 20 + question, "/again"]
    monkeypatch.setattr(sys, "stdin", StringIO("\n".join(lines)))
    run("chat")
    out = capsys.readouterr().out
    assert out.count("layer 0") == out.count("layer 3") == 3 and "amber" in out
    assert "22 tokens seen; a layer: 22 held, 0 evicted;" in out and out.count(" 64 held, ") == 2
    _, second, third = map(int, re.findall(r"(\d+) tokens seen", out))
    assert abs(third - second) <= 4, "the message is read again, behind the first answer"

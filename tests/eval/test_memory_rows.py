"""The rows of caches at shares of the memory of 16 bits, see `benchmarks/memory_rows.py`."""

import copy
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction.preparing.recording import Recording
from scripts import load

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTH = 256


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return load(BENCHMARKS / "memory_rows.py")


def ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 90, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:There is no profile")
def test_a_share_holds_the_same_tokens_in_every_dtype(script: ModuleType) -> None:
    held = []
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(models.shared("llama", "paged_eviction")).to(dtype)
        with torch.inference_mode():
            read = Recording(model, ids(LENGTH, 0))
        caches = script.Caches(model.config)
        kinds = (script.WITHOUT, script.PUBLISHED["random"])
        held.append([caches.make(kind, 1 / 2, read).budget for kind in kinds])
    assert held[0] == held[1] and held[0][1] == LENGTH // 2 < held[0][0]


@pytest.mark.filterwarnings("ignore:There is no profile")
def test_rows_are_of_what_the_full_cache_answers_and_are_measured_once(script: ModuleType, tmp_path: Path) -> None:
    model = models.shared("llama", "paged_eviction")
    context, ask = ids(LENGTH, 0), ids(4, 1)
    with torch.inference_mode():
        first = model(torch.cat([context, ask], 1)).logits[:, -1:].argmax(-1)
    questions = (script.Question(ask, first), script.Question(ask, (first + 1) % 90))
    prompt = script.Prompt("one", context, questions)
    everything = script.Kind("random", {"policy": "random"})
    wanted = [(everything, 1.0), (everything, 1 / 64)]
    found = list(script.rows_of(model, script.Caches(model.config), ["later"], prompt, wanted))
    assert [row["cache"] for row in found] == ["full", "random", "random", "full"]
    assert [row["right"] for row in found if "right" in row] == [True, True, False]
    assert found[1]["kl"] == pytest.approx(0, abs=1e-5) and "too small" in found[2]["refused"]
    path = tmp_path / "rows.jsonl"
    rows = script.Rows(path, {"model": "tiny"})
    assert rows.missing("later", prompt, wanted) == wanted
    for row in found:
        rows.add(row)
    path.write_text(path.read_text() + '{"cut', "utf-8")
    again = script.Rows(path, {"model": "tiny"})
    assert again.rows == json.loads(json.dumps(found)) and again.missing("later", prompt, wanted) == []
    assert again.answered("later", prompt) == 1
    with pytest.raises(SystemExit, match="another run"):
        script.Rows(path, {"model": "other"})


def test_facts_stand_in_the_text_and_answers_behind_their_questions(script: ModuleType) -> None:
    from hf_paged_eviction_eval import embedded

    _, tokenizer = embedded.load()
    prompt: Any = next(script.prompts(tokenizer, "twelve"))
    text = tokenizer.decode(prompt.context[0])
    assert text.count("The passkey of the") == script.FACTS and len(prompt.questions) == script.ASKED
    for question in prompt.questions:
        name = tokenizer.decode(question.ask[0]).split("passkey of the ")[-1].removesuffix(" is")
        assert f"{name} is{tokenizer.decode(question.answer[0])}." in text.replace("  ", " ")

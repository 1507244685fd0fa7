"""Long texts that are read in chunks and asked, see `benchmarks/long_rows.py`."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.feeding import feed
from scripts import load

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Characters:
    """A tokenizer with a token for each printable character."""

    eos_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [min(max(ord(character) - 31, 1), 96) for character in text]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(int(token) + 31) for token in ids)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return load(BENCHMARKS / "long_rows.py")


def test_a_document_has_its_facts_and_is_the_same_each_time(script: ModuleType) -> None:
    one = script.document(Characters(), 6000, 3)
    text = Characters().decode(one.ids[0])
    assert abs(one.ids.shape[1] - 6000) < 900 and one.following.shape == (1, 128)
    assert len(one.questions) == 20 and len({question.ask for question in one.questions}) == 20
    for question in one.questions:
        assert question.number in text and question.first in text
        assert not text.rstrip().endswith(question.number + ".")
        assert question.verdict(question.answer) is True
    assert one.digest == script.document(Characters(), 6000, 3).digest != script.document(Characters(), 6000, 4).digest
    with pytest.raises(ValueError, match="another length"):
        script.document(Characters(), 1000, 0)


def test_a_chain_of_facts_stands_in_its_order(script: ModuleType) -> None:
    one = script.document(Characters(), 6000, 0)
    text = Characters().decode(one.ids[0])
    for question in (question for question in one.questions if question.kind == "track"):
        middle = question.ask.split("VAR ")[-2].split(" ")[0]
        assert 0 <= text.find(f"VAR {question.first} = {question.number}") < text.find(f"VAR {middle} = VAR")


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (" Velden, whose house has 12345", True),
        (" Velden. The house of Velden has the number 12345.", True),
        (" Vel", None),
        (" Velden, and the house", None),
        (" Velden 123", None),
        (" Velden 123.", False),
        (" Velden 54321", False),
        (" Marlow, and the house of Velden has 12345", False),
    ],
)
def test_both_hops_have_to_be_right(script: ModuleType, said: str, verdict: bool | None) -> None:
    question = sys.modules["long_documents"].Question("hop", "", "", "Velden", "12345")
    assert question.verdict(said) is verdict


def test_all_bytes_of_a_cache_are_counted(script: ModuleType) -> None:
    model = models.shared("llama", "paged_eviction")
    ids = torch.randint(3, 90, (1, 64), generator=torch.Generator().manual_seed(0))
    full, ours = DynamicCache(config=model.config), PagedEvictionCache(model.config, 32, policy="keydiff", block_size=8)
    with torch.inference_mode():
        for cache in (full, ours):
            feed(model, ids, None, cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)
    assert script.held_bytes(full) == kept
    assert ours.stats().storage_bytes < script.held_bytes(ours) < kept


@pytest.mark.filterwarnings("ignore:Attention now reaches further")
@pytest.mark.parametrize("chunk", [0, 512])
def test_a_cache_that_holds_everything_answers_as_the_full_one(script: ModuleType, chunk: int) -> None:
    reader = script.Reader(models.shared("llama", "paged_eviction"), Characters(), chunk)
    one = script.document(Characters(), 4000, 0)
    with torch.inference_mode():
        full, all_held = (
            list(script.question_rows(reader, one, script.Kind.of(text), {0, 9, 17})) for text in ("full", "random@1")
        )
    assert [row.get("answer") for row in full] == [row.get("answer") for row in all_held]
    for theirs, ours in zip(full[:-1], all_held[:-1], strict=True):
        assert ours["nats"] == pytest.approx(theirs["nats"], abs=2e-3)


@pytest.mark.parametrize("wrong", ["prepared", "keydiff@0", "keydiff@3/2", "int4@1/4"])
def test_a_cache_without_a_size_is_refused(script: ModuleType, wrong: str) -> None:
    with pytest.raises(ValueError, match="share"):
        script.Kind.of(wrong)


def test_a_row_that_was_cut_off_is_measured_again(script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert script.read_rows(file) == []
    script.append(file, [{"kind": "read"}])
    with file.open("a", encoding="utf-8") as opened:
        opened.write('{"kind": "te')
    assert script.read_rows(file) == [{"kind": "read"}]
    script.append(file, [{"kind": "text"}])
    assert [json.loads(line)["kind"] for line in file.read_text("utf-8").splitlines()] == ["read", "text"]


def test_errors_are_those_of_documents(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    long_tables = load(BENCHMARKS / "long_tables.py")
    same = [{"document": number, "right": right} for number, right in enumerate((True, False) * 8) for _ in range(4)]
    mixed = [{"document": number, "right": right} for number in range(16) for right in (True, True, False, False)]
    assert long_tables.share(same) == "32/64 ± 13 %"  # as 16 questions
    assert long_tables.share(mixed) == "32/64 ± 6 %"  # not below that of 64 questions
    assert long_tables.share([]) == ""


def test_kinds_that_the_full_cache_does_not_answer_make_no_column(script: ModuleType) -> None:
    long_tables = load(BENCHMARKS / "long_tables.py")
    rows = []
    for document in range(4):
        key = {"model": "m", "length": 2048, "chunk": 512, "document": document}
        for cache, part, nats in (("full", "", 2.0), ("keydiff", "1/4", 2.5)):
            own = {**key, "cache": cache, "share": part}
            rows += [{**own, "kind": "one", "question": number, "right": True} for number in range(4)]
            rows += [{**own, "kind": "hop", "question": 9, "right": False}] if cache == "full" else []
            rows += [{**own, "kind": "text", "nats": nats + document}]
            rows += [{**own, "kind": "read", "tokens": 2000, "seconds": 1.0, "peak": 2**20, "bytes": 2**20}]
    text = long_tables.tables([{"kind": "run"}, *rows, *rows])
    assert "m, 2,048 tokens in chunks of 512:" in text and "one fact" in text and "two hops" not in text
    assert "| `keydiff` | 1/4 | 4 | 16/16 ± 6 % |  | +0.500 ± 0.000 | 1.0 | 1.0 |" in text

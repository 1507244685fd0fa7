"""Long texts that are read in chunks and asked, see `benchmarks/long_rows.py`."""

import json
import sys
from argparse import Namespace
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

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        ids = [min(max(ord(character) - 31, 1), 96) for character in text]
        return {"input_ids": ids, "offset_mapping": [(at, at + 1) for at in range(len(text))]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(int(token) + 31) for token in ids)


def long(name: str) -> Any:
    """The part of the benchmark that the script has loaded."""
    return sys.modules.get(f"long_{name}") or load(BENCHMARKS / f"long_{name}.py")


def document(*given: Any) -> Any:
    return long("documents").document(*given)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return load(BENCHMARKS / "long_rows.py")


def test_a_document_has_its_facts_and_is_the_same_each_time(script: ModuleType) -> None:
    one = document(Characters(), 6000, 3)
    text = Characters().decode(one.ids[0])
    assert abs(one.ids.shape[1] - 6000) < 900 and one.following.shape == (1, 128)
    assert len(one.questions) == 20 and len({question.ask for question in one.questions}) == 20
    for question in one.questions:
        assert question.number in text and question.first in text
        assert not text.rstrip().endswith(question.number + ".")
        assert [question.answer[start:end] for start, end in question.found()][-1] == question.number
    facts = [text[start:end] for start, end in one.facts]
    assert len(facts) == 42 and all(fact.endswith((".", "at the door.")) for fact in facts)
    assert all(sum(question.number in fact for fact in facts) == 1 for question in one.questions)
    assert one.digest == document(Characters(), 6000, 3).digest != document(Characters(), 6000, 4).digest
    with pytest.raises(ValueError, match="another length"):
        document(Characters(), 1000, 0)


def test_a_chain_of_facts_stands_in_its_order(script: ModuleType) -> None:
    one = document(Characters(), 6000, 0)
    text = Characters().decode(one.ids[0])
    for question in (question for question in one.questions if question.kind == "track"):
        middle = question.ask.split("VAR ")[-2].split(" ")[0]
        assert 0 <= text.find(f"VAR {question.first} = {question.number}") < text.find(f"VAR {middle} = VAR")


@pytest.mark.parametrize(
    ("answer", "name", "scored"),
    [(" 12345", "", "12345"), (" Velden, and the house has 12345", "Velden", "Velden12345"), (" A = 1", "A", "A1")],
)
def test_words_of_an_answer_are_given_and_name_and_number_are_not(answer: str, name: str, scored: str) -> None:
    number = answer.split()[-1]
    question = long("documents").Question("hop", "Where? ", answer, name, number)

    def ask(wrong_at: int | None) -> dict[str, Any]:
        """A model that knows every token but one."""
        told = Characters()("Where? " + answer)["input_ids"]
        if wrong_at is not None:
            told[len("Where? ") + wrong_at] = 90
        logits = torch.nn.functional.one_hot(torch.tensor([told[1:]]), 97) * 50.0
        reader = long("reader").Reader(models.shared("llama", "paged_eviction"), Characters(), 0)
        reader.feed = lambda _ids, _cache, keep: logits[:, keep]
        row: dict[str, Any] = reader.ask(question, None)
        return row

    assert ask(None) == {"right": True, "answer": scored, "nats": 0.0}
    places = [at for at in range(len(answer)) if not ask(at)["right"]]
    assert "".join(answer[at] for at in places) == scored


def test_all_bytes_of_a_cache_are_counted(script: ModuleType) -> None:
    model = models.shared("llama", "paged_eviction")
    ids = torch.randint(3, 90, (1, 64), generator=torch.Generator().manual_seed(0))
    full, ours = DynamicCache(config=model.config), PagedEvictionCache(model.config, 32, policy="keydiff", block_size=8)
    with torch.inference_mode():
        for cache in (full, ours):
            feed(model, ids, None, cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)
    assert long("reader").held_bytes(full) == kept
    assert ours.stats().storage_bytes < long("reader").held_bytes(ours) < kept


@pytest.mark.filterwarnings("ignore:Attention now reaches further")
@pytest.mark.parametrize("chunk", [0, 512])
def test_a_cache_that_holds_everything_answers_as_the_full_one(script: ModuleType, chunk: int) -> None:
    reader = script.Reader(models.shared("llama", "paged_eviction"), Characters(), chunk)
    one = document(Characters(), 4000, 0)
    with torch.inference_mode():
        full, all_held = (
            list(long("reader").question_rows(reader, one, script.Held.of(text), {0, 9, 17}))
            for text in ("full", "random@1")
        )
    assert [row.get("answer") for row in full] == [row.get("answer") for row in all_held]
    for theirs, ours in zip(full[:-1], all_held[:-1], strict=True):
        assert ours["nats"] == pytest.approx(theirs["nats"], abs=1e-2)  # questions evict some tokens


@pytest.mark.filterwarnings("ignore:Attention now reaches further")
def test_an_oracle_keeps_the_facts_and_few_bits_keep_all_tokens(script: ModuleType) -> None:
    reader, one = (
        script.Reader(models.shared("llama", "paged_eviction"), Characters(), 512),
        document(Characters(), 8000, 0),
    )
    with torch.inference_mode():
        of_all, oracle, other = (
            reader.read(one, script.Held.of(text))[0] for text in ("bits4", "oracle@1/6", "unprepared@1/6")
        )
    assert of_all.bits == [4, 4] and of_all.stats().evicted_tokens == 0 < oracle.stats().evicted_tokens
    oracle.protect(one.facts)  # warns if any is gone
    with pytest.warns(UserWarning, match="do not come back"):
        other.protect(one.facts)


@pytest.mark.parametrize("wrong", ["prepared", "keydiff@0", "keydiff@3/2", "int4@1/4", "bits2@1/2"])
def test_a_cache_without_a_size_is_refused(script: ModuleType, wrong: str) -> None:
    with pytest.raises(ValueError, match="share"):
        script.Held.of(wrong)


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
    same = [{"document": number, "right": right} for number, right in enumerate((True, False) * 8) for _ in range(4)]
    mixed = [{"document": number, "right": right} for number in range(16) for right in (True, True, False, False)]
    assert long("tables").share(same) == "32/64 ± 13 %"  # as 16 questions
    assert long("tables").share(mixed) == "32/64 ± 6 %"  # not below that of 64 questions
    assert long("tables").share([]) == ""


def test_kinds_that_the_full_cache_does_not_answer_make_no_column(script: ModuleType) -> None:
    rows = []
    for document in range(4):
        key = {"model": "m", "length": 2048, "chunk": 512, "document": document}
        for cache, part, nats in (("full", "", 2.0), ("keydiff", "1/4", 2.5)):
            own = {**key, "cache": cache, "share": part}
            rows += [{**own, "kind": "one", "question": number, "right": True} for number in range(4)]
            rows += [{**own, "kind": "hop", "question": 9, "right": False}] if cache == "full" else []
            rows += [{**own, "kind": "text", "nats": nats + document}]
            rows += [{**own, "kind": "read", "tokens": 2000, "seconds": 1.0, "peak": 2**20, "bytes": 2**20}]
    text = long("tables").tables([{"kind": "run"}, *rows, *rows])
    assert "m, 2,048 tokens in chunks of 512:" in text and "one fact" in text and "two hops" not in text
    assert "| `keydiff` | 1/4 | 4 | 16/16 ± 6 % | 16/16 ± 6 % | +0.500 ± 0.000 | 1.0 | 1.0 |" in text


def test_lengths_make_columns_and_kinds_are_counted_over_them(script: ModuleType) -> None:
    rows = []
    for document, length in ((document, length) for document in range(4) for length in (1024, 2048)):
        key = {"model": "m", "length": length, "chunk": 512, "document": document}
        for cache, part, wrong in (("full", "", 0), ("keydiff", "1/4", 1), ("int4", "", 2)):
            own = {**key, "cache": cache, "share": part}
            rows += [{**own, "kind": "one", "question": at, "right": at >= wrong} for at in range(4)]
            rows += [{**own, "kind": "hop", "question": 4, "right": length == 2048}]  # not able at 1,024
            rows += [{**own, "kind": "text", "nats": 2.0 + wrong}]
            held = {"seconds": 1.0, "peak": 2**21, "bytes": 2**20 >> wrong}
            rows += [{**own, "kind": "read", "tokens": length, **held}]
    rows = [row for row in rows if (row["cache"], row["length"]) != ("int4", 1024)]
    lengths, kinds = long("summary").by_length(rows, {"m": "M"}), long("summary").by_kind(rows, {"m": "M"})
    columns = "right, 1,024 | nats lost, 1,024 | right, 2,048 | nats lost, 2,048"
    assert lengths.startswith(f"| model | cache | memory | {columns} |")
    assert "| M: 4, 4 documents | full cache |" in lengths
    assert "|  | `keydiff` | 1/4 | 12/16 ± 11 % | +1.000 ± 0.000 | 16/20 ± 9 % | +1.000 ± 0.000 |" in lengths
    assert "|  | `QuantizedCache`, quanto int4 | 0.25 |  |  | 12/20 ± 11 % | +2.000 ± 0.000 |" in lengths
    assert kinds.startswith("| model | cache | memory | reading, s | peak, MiB | one fact | two hops |")
    assert "| M: 1,024 to 2,048 tokens | full cache |" in kinds and "int4" not in kinds
    assert "|  | `keydiff` | 1/4 | 1.0 | 2.0 | 24/32 ± 8 % | 4/4 ± 19 % |" in kinds


def test_chunks_are_compared_by_the_questions_of_both_ways(script: ModuleType) -> None:
    rows = []
    for document in range(4):
        for chunk, right, nats in ((0, (True, True), 2.0), (512, (True, document > 1), 2.5 + document % 2)):
            key = {"model": "m", "length": 2048, "chunk": chunk, "document": document}
            rows += [
                {**key, "cache": "full", "share": "", "kind": "one", "question": at, "right": True} for at in (0, 1)
            ]
            own = {**key, "cache": "keydiff", "share": "1/4"}
            rows += [{**own, "kind": "one", "question": at, "right": one} for at, one in enumerate(right)]
            rows += [{**own, "kind": "one", "question": 7, "right": False}] if chunk else []  # not asked in one forward
            rows += [{**own, "kind": "text", "nats": nats}]
    line = "| m | 2,048 in 512 | `keydiff`, 1/4 | 4 | 6/8 | 8/8 | -25.0 ± 14.4 | +1.000 ± 0.289 |"
    assert line in long("summary").ways(rows)
    assert long("summary").ways(row for row in rows if row["chunk"]) == ""


def test_long_answers_make_a_line_with_errors(script: ModuleType) -> None:
    key = {"kind": "answer", "model": "m", "length": 2048, "chunk": 512, "cache": "keydiff", "share": "1/4"}
    rows = [
        {**key, "document": number, "question": at, "kl": 0.5 + number % 2, "same": 0.75}
        for number in range(4)
        for at in (0, 250)
    ]
    text = long("tables").answers([{"kind": "run"}, *rows, {**rows[0], "cache": "int4", "share": ""}])
    assert "| answers | from 1 | from 251 |" in text and "int4" not in text
    assert "| m | 2,048 | `keydiff` | 1/4 | 4 | 1.0000 ± 0.2887; 75.0 % | 1.0000 ± 0.2887; 75.0 % |" in text


@pytest.mark.filterwarnings("ignore:Attention now reaches further")
def test_long_answers_of_a_batch_are_those_of_each_document(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long("answers"), "ANSWER", 12)
    monkeypatch.setattr(long("answers"), "PART", 4)
    reader = script.Reader(models.shared("llama", "paged_eviction"), Characters(), 0)
    options = Namespace(name="m", length=4000, chunk=0, first=0, answers=2, output=tmp_path / "both.jsonl")
    kinds = [script.Held.of(text) for text in ("full", "bits4", "random@1/2", "random@1/16")]
    for _ in range(2):  # the second time there is nothing left
        long("answers").measure_answers(options, reader, kinds[0], kinds)
    rows = script.read_rows(options.output)
    assert [row["question"] for row in rows] == [0, 4, 8] * 8
    assert all(row["kl"] == pytest.approx(0, abs=1e-5) and row["same"] == 1 for row in rows[:6])
    assert all(row["kl"] > 1e-4 for row in rows[-6:])
    for index, batched in enumerate((rows[6:9], rows[9:12])):
        alone = Namespace(**{**vars(options), "first": index, "answers": 1, "output": tmp_path / f"{index}.jsonl"})
        long("answers").measure_answers(alone, reader, kinds[0], kinds[1:2])
        for row, other in zip(script.read_rows(alone.output), batched, strict=True):
            assert row.pop("kl") == pytest.approx(other["kl"], rel=0.05) and row.items() <= other.items()

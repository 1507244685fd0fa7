"""Models that think before they answer: what the template is told, what is scored, how long answers may be."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_paged_eviction_eval.metrics.thinking import ENDED, UNENDED, without_thinking
from hf_paged_eviction_eval.report.runs import load_runs
from hf_paged_eviction_eval.running.generation import Generator
from invoking import run
from longbench_files import longbench_record, write_records
from processes import raw_rows, rows_of

#: As of Qwen3: it closes the thinking where it is told to; unlike it, it opens it where it is not.
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] <think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}</think>\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "opened", "answer", "thinking"),
    [
        ("Paris", False, "Paris", None),
        (" Paris\n", False, " Paris\n", None),
        ("<think>Rome? No.</think>\n\nParis", False, "Paris", ENDED),
        ("Rome? No.</think>\nParis", True, "Paris", ENDED),
        ("Rome? No.</think>\nParis", False, "Paris", ENDED),
        ("<think>a</think>b<think>c</think> Paris", False, "Paris", ENDED),
        ("<think></think>", False, "", ENDED),
        ("<think>Rome? Pa", False, "", UNENDED),
        ("\n<think>Rome? Pa", False, "", UNENDED),
        ("Rome? Pa", True, "", UNENDED),
        ("", True, "", UNENDED),
        ("The tag <think> opens it", False, "The tag <think> opens it", None),
    ],
)
def test_what_counts_as_the_answer(text: str, opened: bool, answer: str, thinking: str | None) -> None:
    assert without_thinking(text, opened) == (answer, thinking)


@pytest.fixture
def thinking_folder(model_folder: str, model: Any, tmp_path: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path / "thinks"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_marks_that_are_special_tokens_stay(model: Any, model_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    text = "<think>Rome? No.</think> Paris"
    assert Generator(model, tokenizer).text(tokenizer(text).input_ids) == text
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    generator = Generator(model, tokenizer)
    assert generator.text([*tokenizer(text).input_ids, tokenizer.eos_token_id]) == text
    assert generator.text([]) == ""


def words_of(folder: str, output: Path, *more: str) -> list[str]:
    words = (
        f"eval --model {folder} --device cpu --policies recency --budgets 48,full --block-size 8 --limit 2 --workers 1"
    )
    return [*words.split(), "--output", str(output), *more]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model says, one after the other."""
    texts: list[str] = []
    monkeypatch.setattr(Generator, "text", lambda generator, tokens: texts.pop(0))
    return texts


def test_thinking_is_not_scored(thinking_folder: str, tmp_path: Path, answers: list[str]) -> None:
    data, output = tmp_path / "mine.jsonl", tmp_path / "out"
    write_records(data, [{"context": f"Text {n}. " * 30, "question": "Which?", "answer": "Paris"} for n in range(2)])
    answers += ["Rome?</think>Paris", "Paris Paris", "Paris", "Paris</think>Rome"]
    outcome = run(*words_of(thinking_folder, output, "--task-file", str(data), "--metric", "qa_f1"))
    rows = rows_of(output)
    assert sorted((row["prediction"], row["score"], row["thinking"]) for row in rows) == [
        ("Paris", 0.0, UNENDED),
        ("Paris Paris", 0.0, UNENDED),
        ("Paris</think>Rome", 0.0, ENDED),
        ("Rome?</think>Paris", 1.0, ENDED),
    ]
    note = "4 of 4 answers begin with thinking, which is not scored; 2 of them never came to the end and count as empty"
    assert note in outcome.output
    (own,) = load_runs([output])
    assert any(note in sentence for sentence in own.notes)
    rescored = run("score", str(output))
    assert "another score" not in rescored.output and "50.00" in rescored.output


def test_the_template_is_told(thinking_folder: str, tmp_path: Path, answers: list[str]) -> None:
    """And rows with and without are two kinds."""
    output = tmp_path / "out"
    data = tmp_path / "mine.jsonl"
    write_records(data, [{"context": f"Text {n}. " * 30, "question": "Which?", "answer": "Paris"} for n in range(2)])
    words = words_of(thinking_folder, output, "--task-file", str(data), "--metric", "qa_f1")
    answers += ["Paris"] * 8
    run(*words)
    run(*words, "--chat-template-kwargs", '{"enable_thinking": false}')
    rows = raw_rows(output)
    assert len(rows) == 8
    assert len({(row["settings"], row["thinking"]) for row in rows}) == 2
    assert sorted(str(row["thinking"]) for row in rows) == ["None"] * 4 + [UNENDED] * 4
    again = run("eval", "--config", str(output / "run.yaml"))
    assert len(raw_rows(output)) == 8, again.output


def test_longer_answers_leave_the_protocol(thinking_folder: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_records(data / "trec.jsonl", [longbench_record("trec", 0)])
    more = f"--tasks trec --data-dir {data} --max-length 300 --budgets full".split()
    words = words_of(thinking_folder, tmp_path / "out", *more)
    assert "protocol" not in run(*words).output
    outcome = run(*words, "--max-new-tokens", "70")
    assert "most tokens of an answer (--max-new-tokens): trec 70 in place of 64; the protocol is left" in outcome.output
    rows = raw_rows(tmp_path / "out")
    lengths = sorted((row["max_new_tokens"], row["protocol_tokens"]) for row in rows)
    assert lengths == [(64, None), (70, 64)]
    assert len({(row["settings"], row["max_new_tokens"]) for row in rows}) == 2
    assert "protocol" not in run(*words, "--max-new-tokens", "64").output


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("{", "write a JSON object"),
        ("[1]", "write a JSON object"),
        ('{"tokenize": true}', "tokenize: leave it out"),
        ('{"think_hard": true}', "the chat template of the tokenizer does not ask for think_hard"),
    ],
)
def test_what_is_refused(thinking_folder: str, model_folder: str, tmp_path: Path, more: str, reason: str) -> None:
    words = words_of(thinking_folder, tmp_path / "out", "--tasks", "passkey", "--chat-template-kwargs", more)
    assert reason in " ".join(run(*words, status=2).output.split())


def test_without_a_template_there_is_nothing_to_tell(model_folder: str, tmp_path: Path) -> None:
    options = ["--tasks", "passkey", "--chat-template-kwargs", '{"enable_thinking": false}']
    assert "does not exist" in run(*words_of(model_folder, tmp_path, *options), status=2).output
    outcome = run(*words_of(model_folder, tmp_path, *options, "--chat-template", "never"), status=2)
    assert "has no effect with --chat-template never" in outcome.output

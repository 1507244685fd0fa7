"""The tables of LongBench: official prompts, lengths, rules, and groups of tasks."""

import hashlib
import json

import pytest

from hf_paged_eviction_eval.data.longbench import CATEGORIES, PRESETS, PROMPTS, TASKS
from hf_paged_eviction_eval.data.longbench.records import to_sample
from hf_paged_eviction_eval.data.longbench.tasks import LENGTH_FILE, PROMPT_FILE
from hf_paged_eviction_eval.data.longbench.v2 import PROMPT as PROMPT_V2
from hf_paged_eviction_eval.data.longbench.v2 import to_sample as to_sample_v2
from longbench_files import longbench_record, longbench_v2_record

PROMPTS_SHA256 = "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30"
LENGTHS_SHA256 = "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022"
PROMPT_V2_SHA256 = "68a162252bc9ff71d5d7abca3d69bb31aac3c35f832d657a2866f2018b8a6950"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_the_official_tables_are_unchanged() -> None:
    assert sha256(PROMPT_FILE.read_bytes()) == PROMPTS_SHA256
    assert sha256(LENGTH_FILE.read_bytes()) == LENGTHS_SHA256
    assert sha256(PROMPT_V2.encode()) == PROMPT_V2_SHA256
    assert "Copyright (c) 2023 THU-KEG & Zhipu AI" in (PROMPT_FILE.parent / "NOTICE").read_text("utf-8")


def test_every_prompt_belongs_to_a_task() -> None:
    plain = [name for name, task in TASKS.items() if not task.is_e]
    assert set(plain) == set(PROMPTS) == set(json.loads(LENGTH_FILE.read_text("utf-8")))
    assert [TASKS[name].max_new_tokens for name in ("hotpotqa", "gov_report", "samsum", "lcc_e")] == [32, 512, 128, 64]


def test_counts_and_groups() -> None:
    assert {name: len(tasks) for name, tasks in PRESETS.items()} == {"paper": 5, "en16": 16, "all21": 21, "e13": 13}
    assert sum(TASKS[name].samples for name in PRESETS["all21"]) == 4750
    assert sum(TASKS[name].samples for name in PRESETS["e13"]) == 3668
    left = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}
    assert set(PRESETS["all21"]) - set(PRESETS["en16"]) == left
    assert {TASKS[name].language for name in left} == {"zh"}
    assert {task.category for task in TASKS.values()} == set(CATEGORIES)
    assert all(TASKS[name].base + "_e" == name for name in PRESETS["e13"])


def test_rules_of_single_tasks() -> None:
    def plain(condition: str) -> set[str]:
        return {name for name, task in TASKS.items() if getattr(task, condition) and not task.is_e}

    assert set(PRESETS["all21"]) - plain("chat") == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert plain("first_line") == {"trec", "triviaqa", "samsum", "lsht"}
    assert plain("stop_at_newline") == {"samsum"}
    for name in PRESETS["e13"]:
        task, base = TASKS[name], TASKS[TASKS[name].base]
        rules = ("prompt", "metric", "chat", "first_line", "stop_at_newline", "max_new_tokens", "category", "language")
        assert all(getattr(task, rule) == getattr(base, rule) for rule in rules)


@pytest.mark.parametrize("name", TASKS)
def test_context_and_question_are_the_filled_template(name: str) -> None:
    record = longbench_record(name, 1)
    sample = to_sample(TASKS[name], record, 0, "")
    assert sample.prompt == TASKS[name].prompt.format(**record)
    assert sample.context.endswith(record["context"]) and sample.question
    assert sample.question.count(record["input"]) >= 1
    assert (sample.id, sample.length, list(sample.answers)) == (record["_id"], record["length"], record["answers"])
    assert sample.metric == TASKS[name].metric


def test_braces_in_records_are_not_filled_in() -> None:
    record = longbench_record("hotpotqa", 0) | {"context": "{input} {context} {0} }{", "input": "{context}?"}
    sample = to_sample(TASKS["hotpotqa"], record, 0, "")
    assert sample.prompt == TASKS["hotpotqa"].prompt.format(**record)
    assert sample.context.endswith("{input} {context} {0} }{")


def test_v2_is_four_choices_after_the_text() -> None:
    sample = to_sample_v2(longbench_v2_record(2), 0, "")
    assert sample.context.startswith("Please read") and sample.context.endswith("boats.")
    assert sample.question.startswith("\n</text>\n\nWhat is the correct answer to this question: Who walked first")
    assert "\n(A) Clara\n(B) Denis\n(C) Edith\n(D) Farid\n" in sample.question
    assert sample.question.endswith('"The correct answer is (insert answer here)".')
    assert (sample.metric, sample.answers, sample.max_new_tokens, sample.chat) == ("multiple_choice", ("C",), 128, True)
    assert sample.metadata["difficulty"] == "easy" and sample.metadata["length"] == "long"


def test_v2_leaves_placeholders_inside_of_texts_alone() -> None:
    odd = longbench_v2_record(0) | {
        "context": " $Q$ ",
        "question": " What is $C_A$?\n",
        "choice_A": "$C_B$",
        "choice_D": "$ ",
    }
    prompt = to_sample_v2(odd, 0, "").prompt
    assert "<text>\n$Q$\n</text>" in prompt and "question: What is $C_A$?\n" in prompt
    assert "\n(A) $C_B$\n(B) Bruno\n" in prompt and "\n(D) $\n" in prompt

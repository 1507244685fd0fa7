"""What a run says of itself: progress within a long prompt, how to cut it, what became of prompts and answers."""

import json
from pathlib import Path

import pytest

from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.settings import TaskSettings, TextSettings
from hf_paged_eviction_eval.progress import Progress
from hf_paged_eviction_eval.running.evaluation import evaluate
from hf_paged_eviction_eval.running.requests import Request
from hf_paged_eviction_eval.running.terminal import shorter
from hf_paged_eviction_eval.store.notes import notes_of

ALONE = EvalOptions(workers=1)


@pytest.mark.parametrize("aware", [True, False])
def test_progress_within_a_prompt_and_prompts_cut(tmp_path: Path, model_folder: str, aware: bool) -> None:
    records = [{"context": "word " * count, "question": "Which?", "answers": ["word"]} for count in (120, 10)]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = TaskSettings(
        model=model_folder, policies=("recency",), budgets=("64",), tasks=("mine",), task_file=(str(file),), lengths=(),
        max_length=200, max_new_tokens=2, prefill_chunk_size=50, share_prefill=False, question_aware=aware,
        batch_size=1,
    )  # fmt: skip
    states: list[Progress] = []
    outcome = evaluate(Request(settings, tmp_path / "out", ALONE), states.append)
    assert outcome is not None
    lasts = [state.last for state in states if "tokens" in state.last]
    tokens = max(row["prompt_tokens"] for row in outcome.rows)
    assert lasts[0] == f"mine: 50 of {tokens} tokens" and f"mine: {tokens} of {tokens} tokens" in lasts
    assert all(state.finished + state.begun <= state.total for state in states)
    assert any(0 < state.begun < 1 for state in states)
    cut, *_ = notes_of(outcome.rows)
    assert cut == "prompts that were too long and lost their middle: mine 1 of 2 (--max-length)"
    assert json.loads((tmp_path / "out" / "summary.json").read_text())[0]["truncated"] == 1


def test_what_makes_a_run_shorter_fits_it() -> None:
    one = TaskSettings(policies=("keydiff",), budgets=("25%", "full"), tasks=("mine",), lengths=())
    assert shorter(one, 5 * 2) == "--limit 2, fewer --budgets"
    assert shorter(one.but(policies=()), 1) == "fewer --budgets"
    many = one.but(policies=("keydiff", "recency"), tasks=("passkey", "niah"), lengths=(512, 1024))
    assert shorter(many, 64 * 3 * 4) == "--limit 16, fewer --tasks, fewer --policies, fewer --budgets"
    texts = TextSettings(policies=("keydiff",), budgets=("64",), files=())
    assert shorter(texts, 8) == "--limit 2, a smaller --length"


def test_a_right_answer_among_other_words_is_noticed() -> None:
    common = {"task": "mine", "metric": "qa_f1", "answers": ["Ada Lovelace"]}
    chatter = {**common, "id": "1", "prediction": "Well, it was Ada Lovelace who signed the letter.", "score": 0.36}
    rows = [chatter, {**common, "id": "2", "prediction": "Ada Lovelace", "score": 1.0}]
    (note,) = notes_of(rows)
    assert "mine: 1 of 2 answers hold the right one among other words" in note and "--metric contains" in note
    assert [*notes_of([chatter | {"task": "qasper"}, chatter | {"metric": "contains"}, *rows[1:]])] == []

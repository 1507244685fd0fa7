"""Published suites besides LongBench: their records, prompts and metrics."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.data import file_task
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.requests import task_settings
from hf_paged_eviction_eval.tasks import suites
from hf_paged_eviction_eval.tasks.suites import PUBLISHED

RULER = {
    "index": 4,
    "input": "Some special magic numbers are hidden within the following text.\nWhat is this?\nNoise 7.\n"
    "What are all the special magic numbers for x mentioned in the provided text?",
    "outputs": ["7", "8"],
    "length": 40,
    "answer_prefix": " The special magic numbers for x mentioned in the provided text are",
}


def settings(folder: Path | None, task: str, **how: Any) -> TaskSettings:
    folder_given = {} if folder is None else {"data_dir": str(folder)}
    return TaskSettings(policies=("recency",), budgets=("64",), tasks=(task,), **folder_given, **how)


def put(folder: Path, name: str, *records: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def test_records_of_ruler(tmp_path: Path) -> None:
    put(tmp_path, "niah_multiquery/validation.jsonl", RULER)
    task = "ruler_data_niah_multiquery"
    (sample,) = suites.load_samples(task, settings(tmp_path, task), None, None)
    assert sample.prompt == RULER["input"] + RULER["answer_prefix"]
    assert sample.context.endswith("Noise 7.")
    assert (sample.max_new_tokens, sample.metadata) == (128, {"length": 40})
    assert sample.score("it is 7\x01and no more") == 0.5


@pytest.mark.parametrize(
    ("answer", "right"), [("so \\boxed{\\frac{1}{2}}", 1), ("it is \\boxed{0.5}", 1), ("2", 0), ("", 0)]
)
def test_answers_to_problems(tmp_path: Path, answer: str, right: float) -> None:
    pytest.importorskip("math_verify")
    put(tmp_path, "math500.jsonl", {"problem": "Half of one?", "answer": "\\frac{1}{2}", "level": 1})
    options = settings(tmp_path, "math500", max_new_tokens=9)
    (sample,) = suites.load_samples("math500", options, None, None)
    assert sample.max_new_tokens == 9 and sample.chat
    assert sample.score(answer) == right


def test_whole_numbers_are_answers(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    put(tmp_path, "aime2025.jsonl", {"question": "70?", "answer": 70}, {"question": "b", "answer": "1"})
    options = settings(tmp_path, "aime2025", limit=1)
    (sample,) = suites.load_samples("aime2025", options, None, None)
    assert sample.max_new_tokens == 32_768
    assert sample.score("Then \\boxed{070}.") == 1


def test_what_is_not_there(tmp_path: Path) -> None:
    nowhere = settings(tmp_path, "ruler_data_vt").but(data_dir=None)
    with pytest.raises(UserError, match=r"scripts/data/prepare.py"):
        PUBLISHED["ruler_data_vt"].samples(nowhere)
    put(tmp_path, "vt.jsonl", {"index": 0, "input": "x", "answer": "y"})
    with pytest.raises(UserError, match=r"vt.jsonl.*1.*'outputs'.*ruler_data_vt"):
        PUBLISHED["ruler_data_vt"].samples(settings(tmp_path, "ruler_data_vt"))
    put(tmp_path, "vt.jsonl", {"index": 0, "input": "x", "outputs": "y"})
    with pytest.raises(UserError, match=r"'outputs'.*\"y\""):
        PUBLISHED["ruler_data_vt"].samples(settings(tmp_path, "ruler_data_vt"))


def test_length_of_answers() -> None:
    assert task_settings(EvalOptions(tasks="math500,passkey", max_new_tokens=9)).max_new_tokens == 9
    assert task_settings(EvalOptions(tasks="ruler_data", max_new_tokens=9)).max_new_tokens == 9


def test_digests_follow_the_records(tmp_path: Path) -> None:
    options = settings(tmp_path, "math500")
    put(tmp_path, "math500.jsonl", {"problem": "a", "answer": "1"})
    first = suites.digests("math500", options)
    put(tmp_path, "math500.jsonl", {"problem": "a", "answer": "2"})
    second = suites.digests("math500", options)
    assert first is not None and second is not None
    assert first["prompt"] == second["prompt"] and first["data"] != second["data"]


def test_every_task_is_in_one_group_and_listed() -> None:
    groups = suites.task_groups()
    names = [name for group in ("all21", "e13", "v2", "ruler_data", "mathematics") for name in groups[group]]
    assert sorted(names) == sorted(PUBLISHED)
    assert [len(groups[name]) for name in ("ruler_data", "mathematics")] == [13, 2]
    assert set(suites.expand(["mathematics"])) == set(groups["mathematics"])
    assert all(suites.description(name) and not suites.is_generated(name) for name in PUBLISHED)


def test_a_folder_with_a_part_of_a_group(tmp_path: Path) -> None:
    put(tmp_path, "niah_multiquery/validation.jsonl", RULER)
    with pytest.raises(UserError, match=r"1.*13.*ruler_data.*--tasks ruler_data_niah_multiquery$"):
        suites.expand(["ruler_data"], str(tmp_path))
    assert len(suites.expand(["ruler_data"], str(tmp_path / "absent"))) == 13


def test_every_suite_on_the_hub_is_pinned() -> None:
    hubs = {suite.hub for suite in PUBLISHED.values() if suite.hub is not None}
    assert len(hubs) == 4
    assert all(re.fullmatch(r"[0-9a-f]{40}", hub.revision) for hub in hubs)


@pytest.mark.parametrize(("revision_given", "name"), [(None, "math500"), ("a1b2", "math500"), (None, "aime2025")])
def test_the_commit_is_asked_for(
    revision_given: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[str, str]] = []

    def download(repositories: Sequence[str], filename: str, revision: str) -> Path:
        requested.append((filename, revision))
        path = tmp_path / filename
        path.write_text(json.dumps({"problem": "a", "question": "a", "answer": "1"}) + "\n", "utf-8")
        return path

    monkeypatch.setattr(file_task, "download", download)
    hub = PUBLISHED[name].hub
    assert hub is not None
    assert len(PUBLISHED[name].samples(settings(None, name, dataset_revision=revision_given))) == len(hub.files)
    assert requested == [(filename, revision_given or hub.revision) for filename in hub.files]

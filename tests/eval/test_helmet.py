"""HELMET's files, prompts and scores, against what its own scripts make of the same files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import helmet_files
from hf_paged_eviction_eval.data.prompting import suites
from hf_paged_eviction_eval.data.published import GROUPS, TASKS
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.metrics import score_sample
from hf_paged_eviction_eval.options.settings import TaskSettings

OFFICIAL: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "data/helmet.json").read_text("utf-8")
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("helmet")
    helmet_files.write(folder / "data")
    yield folder


def settings(folder: Path, task: str, **how: Any) -> TaskSettings:
    return TaskSettings(policies=("recency",), budgets=("64",), tasks=(task,), data_dir=str(folder), **how)


@pytest.mark.parametrize("case", OFFICIAL["tasks"], ids=lambda case: case["task"])
def test_prompts_are_official(files: Path, case: dict[str, Any]) -> None:
    samples = suites.load_samples(case["task"], settings(files, case["task"]), None, None)
    prompts = [sample.prompt for sample in samples]
    assert len(prompts) == case["count"]
    assert prompts[0] == case["first"]
    assert hashlib.sha256("\0".join(prompts).encode()).hexdigest() == case["sha256"]
    assert len({sample.id for sample in samples}) == len(samples)
    right = samples[0].answers[0]
    if "msmarco" in case["task"]:
        labels = json.loads(right)
        right = " > ".join(sorted(labels, key=lambda each: -labels[each]))
    else:
        right = " ".join(samples[0].answers)
    assert suites.score(samples[0], right, settings(files, case["task"])) == 1
    assert suites.load_samples(case["task"], settings(files / "data", case["task"], limit=1), None, None) == samples[:1]


@pytest.mark.parametrize("case", OFFICIAL["scores"])
def test_scores_are_official(case: dict[str, Any]) -> None:
    assert score_sample(case["metric"], case["prediction"], case["answers"]) == case["score"]


def test_every_length_has_its_tasks() -> None:
    lengths = ("8k", "16k", "32k", "64k", "128k")
    assert [name for name in GROUPS if name.startswith("helmet")] == [f"helmet_{length}" for length in lengths]
    assert all(len(GROUPS[f"helmet_{length}"]) == 9 for length in lengths)
    assert TASKS["helmet_hotpotqa_128k"].files == ("kilt/hotpotqa-dev-multikilt_1000_k1000_dep3.jsonl",)


def test_demonstrations_are_part_of_the_data(tmp_path: Path) -> None:
    helmet_files.write(tmp_path)
    asked = settings(tmp_path, "helmet_nq_8k")
    first = suites.digests("helmet_nq_8k", asked)
    shown = tmp_path / "kilt/nq-train-multikilt_1000_k3_dep6.jsonl"
    shown.write_text("".join(shown.read_text("utf-8").splitlines(keepends=True)[1:]), "utf-8")
    assert suites.digests("helmet_nq_8k", asked) != first
    shown.unlink()
    with pytest.raises(UserError, match=r"no kilt/nq-train-multikilt_1000_k3_dep6.jsonl"):
        suites.load_samples("helmet_nq_8k", asked, None, None)
    with pytest.raises(UserError, match=r"helmet_nq_8k needs records, .*: get data.tar.gz \(34 GB\)"):
        suites.load_samples("helmet_nq_8k", asked.but(data_dir=None), None, None)
    with pytest.raises(UserError, match=r"helmet_nq_8k needs records, and others to show, which no --dataset has"):
        suites.load_samples("helmet_nq_8k", asked.but(data_dir=None, dataset=str(tmp_path / "json_kv")), None, None)


@pytest.mark.parametrize(
    ("task", "file", "change", "said"),
    [
        ("nq", "kilt/nq-dev-multikilt_1000_k50_dep6", {"ctxs": []}, "line 1: 'ctxs' is .*, it must be a list of pass"),
        ("nq", "kilt/nq-train-multikilt_1000_k3_dep6", {"answers": None}, "nq-train.*, line 1: 'answers' is null"),
        ("nq", "kilt/nq-dev-multikilt_1000_k50_dep6", {"id": 1}, "told apart by 'id', which is .*, not int, none"),
        ("popqa", "kilt/popqa_test_1000_k50_dep6", {"s_pop": 0}, "'s_pop' is 0, it must be a whole number above 0"),
        ("popqa", "kilt/popqa_test_1000_k50_dep6", {"id": [1]}, "told apart by 'id', .*, not int, list"),
        ("msmarco", "msmarco/test_reranking_data_k50_dep3", {"ctxs": [{"id": 1}]}, "with id, text and label"),
        ("json_kv", "json_kv/test_k105_dep6", {"demos": [["a", "b"]]}, "must be a list of 2 or more pairs"),
        ("niah_mv", "ruler/niah_multivalue/validation_8192", {"answer": {}}, "'answer' or 'outputs' is {}"),
    ],
)
def test_records_that_are_not_of_helmet(tmp_path: Path, task: str, file: str, change: Any, said: str) -> None:
    helmet_files.write(tmp_path)
    path = tmp_path / f"{file}.jsonl"
    first, *others = path.read_text("utf-8").splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | change), *others]), "utf-8")
    with pytest.raises(UserError, match=said):
        suites.load_samples(f"helmet_{task}_8k", settings(tmp_path, f"helmet_{task}_8k"), None, None)


def test_too_few_demonstrations(tmp_path: Path) -> None:
    helmet_files.write(tmp_path)
    shown = tmp_path / "kilt/nq-train-multikilt_1000_k3_dep6.jsonl"
    shown.write_text(shown.read_text("utf-8").splitlines()[0], "utf-8")
    with pytest.raises(UserError, match="helmet_nq_8k: there are 1 demonstrations, a prompt has 2"):
        suites.load_samples("helmet_nq_8k", settings(tmp_path, "helmet_nq_8k"), None, None)

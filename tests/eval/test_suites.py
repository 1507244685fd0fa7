"""Names of tasks and groups, and what is behind them."""

from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models.device import model_settings
from hf_paged_eviction_eval.models.loading import load_tokenizer
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.requests import task_settings
from hf_paged_eviction_eval.tasks import available_tasks, make_samples, niah
from hf_paged_eviction_eval.tasks.suites import digests, expand, is_generated, load_samples, task_groups, task_names
from longbench_files import write_longbench


def settings(**changes: Any) -> TaskSettings:
    return TaskSettings(**({"policies": (), "budgets": ("full",), "tasks": ("passkey",)} | changes))


def test_needles_in_texts_of_the_user(tmp_path: Path) -> None:
    essays = tmp_path / "essays"
    essays.mkdir()
    (essays / "b.txt").write_text("Second essay. It is short.\n\nIt ends here.", "utf-8")
    (essays / "a.md").write_text("\n  First essay, about rivers. Rivers run.\n", "utf-8")
    (essays / "c.json").write_text("no text")
    tokenizer = load_tokenizer(model_settings(EvalOptions()))
    options = task_settings(EvalOptions(tasks="niah", haystack=[essays], length="512", limit=24))
    samples = load_samples("niah", options, tokenizer, 512)
    contexts = [sample.context.replace(niah.NEEDLE, "") for sample in samples]
    whole = "First essay, about rivers. Rivers run.\n\nSecond essay. It is short.\n\nIt ends here."
    assert contexts[0].startswith(f"{whole}\n\nFirst essay") and all(
        niah.NEEDLE in sample.context for sample in samples
    )
    assert len({text[:200] for text in contexts[:11]}) == 1  # as others do: only the depth differs
    assert len(set(contexts[11:])) > 3
    assert all(text[:1].isupper() for text in contexts)  # from the beginning of a sentence
    filler = load_samples("niah", options.but(haystack=()), tokenizer, 512)
    assert filler == make_samples("niah", tokenizer, 512, 24)
    before = digests("niah", options)
    (essays / "a.md").write_text("Another essay.")
    assert before and before != digests("niah", options) and digests("niah", options.but(haystack=())) is None


@pytest.mark.parametrize(
    ("name", "tasks", "message"),
    [
        ("nowhere", "niah", "no such file or folder"),
        ("empty", "niah", "no text in there"),
        ("latin.txt", "niah", "cannot be read: it is not text in UTF-8"),
        ("empty", "passkey", "only for the task niah"),
    ],
)
def test_texts_that_hide_no_needle(tmp_path: Path, name: str, tasks: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=f"--haystack .*{message}"):
        task_settings(EvalOptions(tasks=tasks, haystack=[tmp_path / name]))


def test_groups_hold_tasks() -> None:
    groups = task_groups()
    assert {"suite", "ruler", "niah", "paper", "en16", "all21", "e13", "v2"} <= set(groups)
    assert {name: len(groups[name]) for name in ("suite", "ruler", "paper", "en16", "all21", "e13", "v2")} == {
        "suite": 7,
        "ruler": 13,
        "paper": 5,
        "en16": 16,
        "all21": 21,
        "e13": 13,
        "v2": 1,
    }
    names = task_names()
    assert len(names) == len(set(names))
    assert all(set(tasks) <= set(names) and tasks for tasks in groups.values())
    # A name means one thing.
    assert all(groups[name] == (name,) for name in set(groups) & set(names))


def test_names_are_expanded_in_order_and_once() -> None:
    assert expand(["qasper", "paper", "passkey", "qasper"]) == (
        *("qasper", "hotpotqa", "multifieldqa_en", "gov_report", "multi_news"),
        "passkey",
    )
    assert expand(["v2", "suite"])[:2] == ("longbench_v2", "passkey")
    assert expand([]) == ()
    assert expand(["e13", "all21"]) == (*task_groups()["e13"], *task_groups()["all21"])


@pytest.mark.parametrize(
    ("name", "close"), [("hotpot_qa", "hotpotqa"), ("rulers", "ruler"), ("gov_report_E", "gov_report_e")]
)
def test_unknown_names_list_what_there_is(name: str, close: str) -> None:
    with pytest.raises(UserError) as caught:
        expand(["qasper", name])
    text = str(caught.value)
    assert f"unknown task {name!r} (--tasks), did you mean {close!r}? Groups: " in text
    assert "en16" in text and "`paged-eviction tasks`" in text and len(text) < 400, "no wall of names"
    with pytest.raises(UserError, match=r"unknown task 'zzz' \(--tasks\)\. Groups: "):
        expand(["zzz"])


def test_generated_samples(tokenizer: Any) -> None:
    assert is_generated("passkey") and not is_generated("qasper") and not is_generated("longbench_v2")
    assert len(load_samples("passkey", settings(), tokenizer, 128)) == 64
    few = load_samples("passkey", settings(limit=2, seed=3), tokenizer, 128)
    assert len(few) == 2 and few != load_samples("passkey", settings(limit=2), tokenizer, 128)
    with pytest.raises(UserError, match="--length"):
        load_samples("kv_recall_many", settings(), tokenizer, 16)


def test_digests(tmp_path: Path) -> None:
    options = settings(data_dir=str(write_longbench(tmp_path, ["qasper", "qasper_e"])))
    plain, by_length = digests("qasper", options), digests("qasper_e", options)
    assert plain and by_length and plain["prompt"] == by_length["prompt"] and plain["data"] != by_length["data"]
    assert all(digests(name, options) is None for name in available_tasks())

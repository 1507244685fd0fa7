"""The command as a person uses it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval import cli
from hf_paged_eviction_eval.errors import RowsFailed
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.running import plans, requests
from hf_paged_eviction_eval.running.runner import run_batch
from hf_paged_eviction_eval.store.checks import row_key
from hf_paged_eviction_eval.store.results import Row
from invoking import run
from policy_kinds import NAMES
from processes import meta_of, rows_of


@pytest.fixture
def command(model_folder: str, tmp_path: Path) -> list[str]:
    words = f"eval --model {model_folder} --tasks passkey,kv_recall --policies paged_eviction,recency --limit 3"
    return f"{words} --length 200 --batch-size 2 --budgets 10%,full --block-size 8 --output {tmp_path}/out".split()


def test_a_run_and_what_it_writes(command: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = run(*command, "--device", "cpu")
    assert "paged_eviction" in result.output and "mean of 2" in result.output
    rows = rows_of(output)
    assert len(rows) == 2 * 3 * (2 + 1)
    assert {row["budget_tokens"] for row in rows if row["policy"] != "full"} == {24}
    assert all(row["question_aware"] for row in rows)
    summary = json.loads((output / "summary.json").read_text("utf-8"))
    assert len(summary) == 2 * (2 + 1) and all(cell["samples"] == 3 for cell in summary)
    meta = meta_of(output)
    assert meta["settings"]["seed"] == 0 and meta["seconds"] > 0 and meta["complete"] and meta["failures"] == []
    assert set(meta["versions"]) >= {"torch", "transformers", "accelerate", "datasets", "python", "platform"}
    assert meta["hardware"]["cpu_threads"] >= 1 and meta["hardware"]["memory_bytes"] > 2**28
    assert meta["model"] == meta["model"] | {"attn_implementation": "sdpa", "dtype": "float32", "devices": ["cpu"]}
    assert meta["tasks"]["passkey"]["samples"] == 3 and meta["tasks"]["passkey"]["truncated"] == 0


def test_full_in_either_list_is_the_full_cache_once(command: list[str], tmp_path: Path) -> None:
    words = " ".join(command).replace("paged_eviction,recency", "full,recency").replace("10%,full", "10%")
    run(*words.split(), "--question-agnostic", "--heads", "separate", "--agreement", "--device", "cpu")
    rows = rows_of(tmp_path / "out")
    assert {(row["policy"], row["budget"]) for row in rows} == {("full", "full"), ("recency", "10%")}
    assert not any(row["question_aware"] for row in rows)
    assert all(row["agreement"] is not None for row in rows)


def test_rows_that_do_not_fit_are_named_and_tried_again(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_big(*args: Any) -> Iterator[list[Row]]:
        keys = []
        for rows in run_batch(*args):
            if rows[0]["task"] == "passkey":
                keys += map(row_key, rows)
            else:
                yield rows
        if keys:
            raise RowsFailed(tuple(keys), "no memory for 3 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(plans, "run_batch", too_big)
        output = run(*command, "--device", "cpu", "--workers", "1", status=1).output
    assert "9 rows are missing" in output and "no memory for 3 GiB" in output and "tries them again" in output
    meta = meta_of(tmp_path / "out")
    assert sum(failure["rows"] for failure in meta["failures"]) == 9 and not meta["complete"]
    assert len(rows_of(tmp_path / "out")) == 9
    run(*command, "--device", "cpu", "--workers", "1")
    meta = meta_of(tmp_path / "out")
    assert meta["failures"] == [] and meta["complete"] and len(rows_of(tmp_path / "out")) == 18


def test_other_versions_are_remembered(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(*command, "--device", "cpu")
    (rows,) = (tmp_path / "out").glob("rows.*")
    rows.write_bytes(b"".join(rows.read_bytes().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr("hf_paged_eviction.__version__", "9.9")
    result = run(*command, "--device", "cpu")
    assert "other versions: hf_paged_eviction 0.2.0.dev0 then, 9.9 now" in result.output
    meta = meta_of(tmp_path / "out")
    assert meta["versions"]["hf_paged_eviction"] == "9.9"


def test_policies_that_see_queries_get_the_attention_that_shows_them(command: list[str], tmp_path: Path) -> None:
    words = " ".join(command).replace("paged_eviction,recency", "h2o")
    run(*words.split(), "--device", "cpu")
    meta = meta_of(tmp_path / "out")
    assert meta["model"]["attn_implementation"] == "paged_eviction"


def test_texts(model_folder: str, tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text(Path(__file__).read_text("utf-8"), "utf-8")
    words = f"eval --text {source} --model {model_folder} --policies keydiff --budgets 64,full --length 300"
    command = [*words.split(), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert "keydiff" in run(*command).output
    rows = rows_of(tmp_path / "out")
    assert {(row["policy"], row["budget_tokens"]) for row in rows} == {("keydiff", 64), ("full", None)}
    run("eval", "--config", str(tmp_path / "out" / "run.yaml"))
    assert rows_of(tmp_path / "out") == rows
    run(*command, "--positions", "cache")
    more = [row for row in rows_of(tmp_path / "out") if row not in rows]
    assert [row["policy"] for row in more] == ["keydiff, positions=cache"]
    assert len(rows_of(tmp_path / "out")) == len(rows) + 1, "those that were there stay"
    command += ["--positions", "text,cache"]
    run(*command)
    assert rows_of(tmp_path / "out") == sorted([*rows, *more], key=lambda row: json.dumps(row, sort_keys=True))
    source.write_text("# another text\n" + source.read_text("utf-8"), "utf-8")
    run(*command)
    assert len(rows_of(tmp_path / "out")) == 2 * len([*rows, *more]), "another text under its name is read"


def test_chunks_share_no_prefill() -> None:
    request = requests.task_request(EvalOptions(prefill_chunk_size=64))
    assert request.settings.prefill_chunk_size == 64 and not request.settings.share_prefill


def test_the_default_is_the_embedded_suite() -> None:
    request = requests.task_request(EvalOptions())
    assert len(request.settings.tasks) == 7 and request.settings.model == "embedded"
    assert request.settings.policies == tuple(EvalOptions().policies.split(",")) and request.settings.device == "cpu"
    every = requests.task_request(EvalOptions(policies="all"))
    assert every.settings.policies == NAMES


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    for name in [name for name in sys.modules if name.startswith("hf_paged_eviction_eval.commands")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit, match=r"'hf_paged_eviction\[eval\]'"):
        cli.main()

"""The command as a person uses it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from hf_paged_eviction import available_policies
from hf_paged_eviction_eval import cli
from hf_paged_eviction_eval.commands import app


def run(*arguments: str, status: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def command(model_folder: str, tmp_path: Path) -> list[str]:
    words = f"eval --model {model_folder} --tasks passkey,kv_recall --policies paged_eviction,recency --samples 3"
    return f"{words} --length 600 --batch-size 2 --budgets 10%,full --block-size 8 --output {tmp_path}/out".split()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "results.jsonl").read_text("utf-8").splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda row: json.dumps(row, sort_keys=True))


def test_tasks_resume_and_conflict(command: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = run(*command)
    assert "paged_eviction" in result.output and "mean of 2 tasks" in result.output
    rows = rows_of(output)
    assert len(rows) == 2 * 3 * (2 + 1)
    assert {row["budget_tokens"] for row in rows if row["policy"] != "full"} == {64}
    summary = json.loads((output / "summary.json").read_text("utf-8"))
    assert len(summary) == 2 * (2 + 1) and all(cell["samples"] == 3 for cell in summary)
    meta = json.loads((output / "run_meta.json").read_text("utf-8"))
    assert meta["settings"]["seed"] == 0 and meta["seconds"] > 0
    assert set(meta["versions"]) >= {"torch", "transformers"} and meta["hardware"]["cpu_threads"] >= 1

    # A run that died while it wrote a line is completed, whatever number of processes completes it.
    content = (output / "results.jsonl").read_bytes()
    (output / "results.jsonl").write_bytes(content[: len(content) // 2])
    (output / "summary.json").unlink()
    run(*command, "--workers", "2")
    assert rows_of(output) == rows
    assert json.loads((output / "summary.json").read_text("utf-8")) == summary

    result = run(*command, "--seed", "1", status=2)
    assert "seed: 0 there, 1 now" in result.output
    assert rows_of(output) == rows


def test_plots_are_pictures(command: list[str], tmp_path: Path) -> None:
    run(*command, "--question-aware", "--heads", "separate")
    for name in ("accuracy.png", "accuracy_by_task.png"):
        content = (tmp_path / "out" / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_texts(model_folder: str, tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text(Path(__file__).read_text("utf-8"), "utf-8")
    words = f"eval --text {source} --model {model_folder} --policies keydiff --budgets 64,full --length 300"
    command = [*words.split(), "--output", str(tmp_path / "out")]
    assert "keydiff" in run(*command).output
    rows = rows_of(tmp_path / "out")
    assert [(row["policy"], row["budget_tokens"]) for row in rows] == [("keydiff", 64), ("full", None)]
    content = (tmp_path / "out" / "perplexity.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000
    run(*command)
    assert rows_of(tmp_path / "out") == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--policies nope", "paged_eviction"),
        ("--tasks nope", "passkey"),
        ("--budgets 0%", "12.5%"),
        ("--length many", "1024"),
        ("--text none.txt", "no such file: none.txt"),
        ("none.txt", "--text"),
        ("--text --full", "leave them out"),
        ("--full --samples 3", "--full"),
        ("--device nowhere", "nowhere"),
        ("--model no/such/model/here", "no/such/model/here"),
        ("--tokenizer x", "--tokenizer"),
    ],
)
def test_mistakes_are_explained(arguments: str, message: str, tmp_path: Path) -> None:
    result = run("eval", *arguments.split(), "--output", str(tmp_path / "out"), status=2)
    assert message in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_too_short_prompts_are_refused(command: list[str]) -> None:
    result = run(*command, "--length", "60", status=2)
    assert "--length" in result.output


def test_lists() -> None:
    policies = run("policies").output
    assert all(name in policies for name in available_policies()) and "2509.04377" in policies
    assert "passkey" in run("tasks").output
    assert run("--version").output.strip() == "0.1.0"
    assert "Examples" in run("eval", "--help").output


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "hf_paged_eviction_eval.commands")
    with pytest.raises(SystemExit, match=r"hf_paged_eviction\[eval\]"):
        cli.main()


def test_killed_run_leaves_no_processes(command: list[str], tmp_path: Path) -> None:
    arguments = [*command, "--workers", "2", "--samples", "64"]
    process = subprocess.Popen([sys.executable, "-m", "hf_paged_eviction_eval", *arguments], stderr=subprocess.DEVNULL)
    rows = tmp_path / "out" / "results.jsonl"
    deadline = time.monotonic() + 60
    while not rows.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    children = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    process.kill()
    process.wait()
    assert len(children) == 2
    assert not psutil.wait_procs(children, timeout=20)[1]

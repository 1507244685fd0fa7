"""A run that was stopped, however, ends with the rows of one that was not."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from processes import Commands, rows_of

LIMIT = 6
ROWS = 2 * LIMIT * (1 + 2)


@pytest.fixture(scope="module")
def words(model_folder: str) -> list[str]:
    text = f"eval --model {model_folder} --device cpu --tasks passkey,kv_recall --policies paged_eviction,recency"
    return f"{text} --limit {LIMIT} --length 400 --batch-size 2 --budgets 10%,full --block-size 8".split()


@pytest.fixture(scope="module")
def expected(commands: Commands, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("expected")
    status, output = commands.run([*words, "--output", str(folder)])
    assert status == 0, output
    assert len(rows_of(folder)) == ROWS
    return folder


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.all_cases)])
def test_killed_again_and_again(
    commands: Commands, words: list[str], expected: Path, tmp_path: Path, seed: int
) -> None:
    """In the middle of a row, and anywhere: while it loads, repairs, writes."""
    chance, rows = random.Random(seed), tmp_path / "results.jsonl"
    command, size = [*words, "--output", str(tmp_path)], (expected / "results.jsonl").stat().st_size
    for share in (0.4, 0.6, 0.8):
        status, output = commands.run(command, most_bytes=int(share * size) + chance.randint(0, 400), deadly=True)
        assert status == -signal.SIGXFSZ, output
        child = commands.start(command)
        time.sleep(chance.random() / 4)
        child.kill()
        child.wait()
    assert 0.7 * size < rows.stat().st_size
    status, output = commands.run(command)
    assert status == 0, output
    assert rows_of(tmp_path) == rows_of(expected)
    meta = json.loads((tmp_path / "run_meta.json").read_text("utf-8"))
    before = json.loads((expected / "run_meta.json").read_text("utf-8"))
    assert meta["rows"] == {"finished": ROWS, "wanted": ROWS} and meta["complete"]
    assert meta["tasks"] == before["tasks"] and meta["settings"] == before["settings"]
    assert (tmp_path / "summary.json").read_text() == (expected / "summary.json").read_text()
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk(commands: Commands, words: list[str], expected: Path, tmp_path: Path) -> None:
    command = [*words, "--output", str(tmp_path)]
    for kilobytes in (6, 14, 25):
        status, output = commands.run(command, most_bytes=kilobytes * 1024)
        assert status == 2, output
        assert "cannot write" in output and "the same command continues" in output and "Traceback" not in output
    assert 0 < len(rows_of(tmp_path)) < ROWS
    status, output = commands.run(command)
    assert status == 0, output
    assert rows_of(tmp_path) == rows_of(expected)


def test_half_a_line_a_line_twice_and_a_damaged_one(
    commands: Commands, words: list[str], expected: Path, tmp_path: Path
) -> None:
    command = [*words, "--output", str(tmp_path)]
    for name in ("results.jsonl", "run_meta.json"):
        (tmp_path / name).write_bytes((expected / name).read_bytes())
    rows = tmp_path / "results.jsonl"
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([*lines[:20], lines[3], lines[7], *lines[22:30], lines[30][:50]]))
    status, output = commands.run(command)
    assert status == 0 and "2 rows are there twice" in output and "cut off" in output
    assert rows_of(tmp_path) == rows_of(expected)

    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([*lines[:4], lines[4][:30] + b"\n", *lines[5:]]))
    status, output = commands.run(command)
    assert status == 2 and f"{rows}, line 5 is damaged" in output
    rows.write_bytes(b"".join([*lines[:4], *lines[5:]]))  # what the message says
    status, output = commands.run(command)
    assert status == 0, output
    assert rows_of(tmp_path) == rows_of(expected)


def test_nothing_is_done_twice(commands: Commands, words: list[str], expected: Path) -> None:
    before = {path: path.read_bytes() for path in expected.glob("results*")}
    status, output = commands.run([*words, "--output", str(expected)])
    assert status == 0 and f"{ROWS}/{ROWS}" in output and "\x1b" not in output and "\r" not in output
    assert {path: path.read_bytes() for path in expected.glob("results*")} == before


def test_other_settings_and_their_file(commands: Commands, words: list[str], expected: Path, tmp_path: Path) -> None:
    status, output = commands.run([*words, "--output", str(expected), "--seed", "1", "--budgets", "20%,full"])
    assert status == 2
    assert ":\n  seed: 0 there, 1 now\nchoose" in output, "what a folder may grow by is no difference"
    config = str(expected / "run.yaml")
    status, output = commands.run(["eval", "--config", config])
    assert status == 0 and f"{ROWS}/{ROWS}" in output
    status, output = commands.run(["eval", "--config", config, "--output", str(tmp_path), "--limit", "1"])
    assert status == 0, output
    assert [row for row in rows_of(expected) if row["id"].endswith("/0")] == rows_of(tmp_path)


def test_a_run_grows(commands: Commands, words: list[str], expected: Path, tmp_path: Path) -> None:
    """More policies, budgets, tasks, lengths and samples, one after the other: the rows of one run with all of it."""
    few = " ".join(words).replace("passkey,kv_recall", "passkey").replace("paged_eviction,recency", "recency")
    few = few.replace(f"--limit {LIMIT}", "--limit 3").replace("10%,full", "10%")
    status, output = commands.run([*few.split(), "--output", str(tmp_path)])
    assert status == 0 and len(rows_of(tmp_path)) == 3, output
    before = (tmp_path / "results.jsonl").read_bytes()
    status, output = commands.run([*words, "--output", str(tmp_path)])
    assert status == 0, output
    assert f"this folder grows: policies paged_eviction; budgets full; tasks kv_recall; limit 3 to {LIMIT}" in output
    assert (tmp_path / "results.jsonl").read_bytes().startswith(before), "nothing is computed twice"
    assert sorted(map(_without_costs, rows_of(tmp_path))) == sorted(map(_without_costs, rows_of(expected)))
    meta, whole = (json.loads((folder / "run_meta.json").read_text("utf-8")) for folder in (tmp_path, expected))
    assert meta["tasks"].items() >= {"passkey": whole["tasks"]["passkey"]}.items() and meta["complete"]
    # Less than what is there: nothing to do, and nothing is lost. Then another length, which the folder has not.
    status, output = commands.run([*few.split(), "--output", str(tmp_path)])
    assert status == 0 and f"{ROWS}/{ROWS}" in output and "folder grows" not in output
    status, output = commands.run([*few.replace("400", "300").split(), "--output", str(tmp_path)])
    assert status == 0 and len(rows_of(tmp_path)) == 2 * ROWS, output
    assert "this folder has paged_eviction, full, kv_recall, 400, too, and what is missing of that runs" in output
    # What is known of a prompt must still be so when the folder grows.
    meta = json.loads((tmp_path / "run_meta.json").read_text("utf-8"))
    meta["tasks"]["passkey"]["ids_sha256"] = "0" * 64
    (tmp_path / "run_meta.json").write_text(json.dumps(meta))
    status, output = commands.run([*words, "--output", str(tmp_path), "--policies", "random"])
    assert status == 2 and "the prompts of passkey are others now" in output


def _without_costs(row: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "efficiency"}, sort_keys=True)


def test_two_at_once(commands: Commands, words: list[str], tmp_path: Path) -> None:
    from hf_paged_eviction_eval.store import lock

    with lock.held(tmp_path / "results.jsonl"):
        status, output = commands.run([*words, "--output", str(tmp_path)])
    assert status == 2 and f"another process is writing to {tmp_path}" in output
    assert not (tmp_path / "results.jsonl").exists()


def test_changed_data_is_refused(commands: Commands, words: list[str], expected: Path, tmp_path: Path) -> None:
    meta = json.loads((expected / "run_meta.json").read_text("utf-8"))
    meta["tasks"]["kv_recall"]["ids_sha256"] = "0" * 64
    (tmp_path / "run_meta.json").write_text(json.dumps(meta))
    status, output = commands.run([*words, "--output", str(tmp_path)])
    assert status == 2 and "the prompts of kv_recall are others now" in output

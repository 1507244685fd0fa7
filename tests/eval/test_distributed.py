"""Several processes share a run: the same rows, whoever dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from hf_paged_eviction_eval.distributed import MainError, Team, join, speaker
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.settings import TaskSettings
from hf_paged_eviction_eval.store import lock, shards
from processes import Child, Commands, rows_of, wait_for

LIMIT = 12
ROWS = 2 * LIMIT * (1 + 2)


@pytest.fixture(scope="module")
def words(model_folder: str) -> list[str]:
    text = f"eval --model {model_folder} --device cpu --tasks passkey,kv_recall --policies paged_eviction,recency"
    return f"{text} --limit {LIMIT} --length 400 --batch-size 2 --budgets 10%,full --block-size 8".split()


@pytest.fixture(scope="module")
def expected(commands: Commands, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("expected")
    status, output = commands.run([*words, "--output", str(folder)])
    assert status == 0, output
    return folder


def start(commands: Commands, command: list[str]) -> list[Child]:
    """Two processes that no launcher watches over."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        commands.start(command, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
    ]


def test_accelerate_launch_gives_the_rows_of_one_process(words: list[str], expected: Path, tmp_path: Path) -> None:
    launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    command = f"{launch} --dynamo_backend no --main_process_port 0 -m hf_paged_eviction_eval".split()
    done = subprocess.run(
        [sys.executable, *command, *words, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path) == rows_of(expected)
    assert done.stdout.count("mean of 2 tasks") == 1 and done.stderr.count("written to") == 1
    assert not list(tmp_path.glob("*rank*")) and not list(tmp_path.glob(".rank*"))
    meta = json.loads((tmp_path / "run_meta.json").read_text("utf-8"))
    assert meta["hardware"]["processes"] == 2 and meta["complete"]


def test_one_that_dies_is_not_waited_for(commands: Commands, words: list[str], expected: Path, tmp_path: Path) -> None:
    command = [*words, "--output", str(tmp_path)]
    main, other = start(commands, command)
    shard = shards.rows_path(tmp_path, 1)
    wait_for(lambda: shard.exists() and shard.stat().st_size)
    other.kill()
    assert other.wait() == -9
    assert main.wait() == 1, main.output
    assert "process 1 of 2 died before it was done" in main.output and "rows are missing" in main.output
    assert ROWS // 2 < len(rows_of(tmp_path)) < ROWS
    assert not shard.exists()
    assert not json.loads((tmp_path / "run_meta.json").read_text("utf-8"))["complete"]
    status, output = commands.run(command)
    assert status == 0, output
    assert rows_of(tmp_path) == rows_of(expected)


def test_the_others_do_not_outlive_the_main_one(
    commands: Commands, words: list[str], expected: Path, tmp_path: Path
) -> None:
    command = [*words, "--output", str(tmp_path)]
    main, other = start(commands, command)
    shard = shards.rows_path(tmp_path, 1)
    wait_for(lambda: shard.exists() and shard.stat().st_size)
    main.kill()
    assert main.wait() == -9
    assert other.wait() == 2
    assert "process 1 of 2: error: the main process ended early" in other.output
    assert shard.stat().st_size
    status, output = commands.run(command)
    assert status == 0, output
    assert rows_of(tmp_path) == rows_of(expected) and not shard.exists()


def test_what_the_main_one_refuses_it_says_alone(commands: Commands, words: list[str], expected: Path) -> None:
    before = (expected / "results.jsonl").read_bytes()
    children = start(commands, [*words, "--output", str(expected), "--seed", "1"])
    assert [child.wait() for child in children] == [2, 2]
    assert "seed: 0 there, 1 now" in children[0].output
    assert "error" not in children[1].output and "Traceback" not in children[1].output
    assert (expected / "results.jsonl").read_bytes() == before


def test_a_split_model_writes_once(commands: Commands, words: list[str], expected: Path, tmp_path: Path) -> None:
    changes = ["--policies", "recency", "--limit", "2", "--output", str(tmp_path), "--tensor-parallel"]
    children = start(commands, [*words, *changes])
    assert [child.wait() for child in children] == [0, 0], [child.output for child in children]
    names = {row["id"] for row in rows_of(tmp_path)}
    assert rows_of(tmp_path) == [
        row for row in rows_of(expected) if row["id"] in names and row["policy"] != "paged_eviction"
    ]
    assert "written to" in children[0].output and "written to" not in children[1].output
    assert not list(tmp_path.glob("*rank*")) and not list(tmp_path.glob(".rank*"))


def test_every_job_has_one_process() -> None:
    jobs = list(range(7))
    assert sorted(job for rank in range(3) for job in Team(rank, 3).share(jobs)) == jobs
    assert Team(2, 3, split=False).share(jobs) == jobs


def test_rows_and_notes_of_the_others(tmp_path: Path) -> None:
    ready = threading.Event()

    def follow() -> None:
        with shards.Shard(tmp_path, 1) as shard:
            ready.set()
            shard.append([{"id": 1}, {"id": 2}])
            shard.finish({"failures": [["no memory", 3]]})

    with lock.held(tmp_path):
        thread = threading.Thread(target=follow)
        thread.start()
        assert ready.wait(10)
        others = shards.Others(tmp_path, (1,))
        ticks: list[int] = []
        assert others.wait(lambda: ticks.append(others.finished_rows())) == {1: {"failures": [["no memory", 3]]}}
        assert ticks[-1] == 2
        assert thread.is_alive()  # until it is told that its rows were taken
        others.dismiss()
        thread.join(10)
        assert not thread.is_alive()
    assert {path.name for path in tmp_path.iterdir()} == {lock.NAME, "results.rank00001.jsonl"}


def test_folders_that_are_not_shared_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one folder that all of them see"):
        shards.Others(tmp_path, (1,)).check()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="one folder that all of them see"), shards.Shard(tmp_path / "file" / "x", 1):
        pass
    with shards.Shard(tmp_path, 1):
        shards.Others(tmp_path, (1,)).check()


def test_an_earlier_process_that_is_still_alive_is_noticed(tmp_path: Path) -> None:
    shards.mark_path(tmp_path, 2).touch()
    with shards.Shard(tmp_path, 1), pytest.raises(UserError, match="a process of an earlier run still writes"):
        shards.clear(tmp_path)
    shards.clear(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"tensor_parallel": True}, "1", "torchrun"),
        ({"device_map": "auto"}, "2", "without a launcher"),
        ({"device": "cuda:1"}, "2", "--device cuda$"),
    ],
)
def test_settings_that_do_not_go_with_the_launcher(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], world: str, message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(UserError, match=message):
        join(TaskSettings(policies=(), budgets=("full",), tasks=("passkey",), **changes))  # type: ignore[arg-type]


def test_who_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speaker(UserError("x")) == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert speaker(UserError("x")) == ""
    monkeypatch.setenv("RANK", "1")
    assert speaker(UserError("x")) is None and speaker(MainError("x")) is None


@pytest.mark.parametrize("cpu", ["True", "False", None])
def test_accelerate_starts_one_process_on_a_cpu(cpu: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of `--num_processes` to the one that it starts, so this one says it."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if cpu is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", cpu)
    settings = TaskSettings(policies=(), budgets=("full",), tasks=("passkey",))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert join(settings) == Team()
    said = [str(each.message) for each in found]
    assert len(said) == (cpu == "True") and all("torchrun --nproc-per-node 2" in each for each in said)

"""Processes that share a run end with it, whatever ends it, and whenever."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running import evaluation
from hf_paged_eviction_eval.running.evaluation import evaluate
from hf_paged_eviction_eval.running.processes.children import Children
from hf_paged_eviction_eval.running.requests import Request
from processes import Child, Commands, raw_rows, wait_for

#: Far more than a busy machine needs. Nothing here waits longer than it takes.
PATIENCE = 300


def test_what_a_worker_refuses_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("nonsense: 1\n")
    with (
        pytest.raises(UserError, match=r"^.*unknown option 'nonsense'"),
        Children(tmp_path / "run.yaml", 2) as children,
    ):
        children.start([2])
        children.wait(lambda: None)


@pytest.mark.parametrize(("content", "expected"), [(None, [[2]]), ("", [])], ids=["a new folder", "a run that goes on"])
def test_workers_load_the_model_while_the_run_does(
    content: str | None, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that goes on, nobody knows yet who has something to do."""
    started: list[list[int]] = []

    class Recorded(Children):
        def start(self, shards: Iterable[int]) -> None:
            started.append([*shards])

    def load_model(*_: object, **__: object) -> None:
        assert started == expected
        raise UserError("the model of this run")

    monkeypatch.setattr(evaluation, "Children", Recorded)
    monkeypatch.setattr(evaluation, "load_model", load_model)
    if content is not None:
        (tmp_path / "rows.1.jsonl").write_text(content)
    settings = TaskSettings(
        policies=("recency",), budgets=("64",), tasks=("passkey",), lengths=(128,), limit=2, batch_size=1
    )
    with pytest.raises(UserError, match="the model of this run"):
        evaluate(Request(settings, tmp_path, EvalOptions(workers=2)), lambda _: None)
    assert (tmp_path / "run.yaml").exists() == bool(expected)


def test_workers_end_with_a_run_that_is_killed(commands: Commands, model_folder: str, tmp_path: Path) -> None:
    """In the middle of its work."""
    words = f"eval --model {model_folder} --tasks passkey --length 400 --limit 300 --batch-size 1 --block-size 8"
    words += f" --policies paged_eviction --budgets 10% --workers 2 --device cpu --output {tmp_path}"
    child = commands.start(words.split())
    wait_for(lambda: workers_of(child) and raw_rows(tmp_path), PATIENCE, every=0.1)
    workers = workers_of(child)
    child.kill()
    assert child.wait() == -9 and len(workers) == 1
    assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []


def workers_of(child: Child) -> list[psutil.Process]:
    processes = []
    for process in psutil.Process(child.pid).children():
        with suppress(psutil.NoSuchProcess):
            if "--shard" in process.cmdline():
                processes.append(process)
    return processes


def test_a_run_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    with Children(tmp_path / "run.yaml", 3) as children:
        sleeping = [sys.executable, "-c", "import time; time.sleep(3600)"]
        children._commands = {2: sleeping, 3: sleeping}
        children.start([2, 3])
        assert not children.check()
        children._running[0].kill()
        with pytest.raises(UserError, match="a worker process was killed"):
            children.wait(lambda: None)
    assert all(process.poll() is not None for process in children._running)

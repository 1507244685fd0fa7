"""Processes that share a run end with it, whatever ends it, and whenever."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from processes import Child, Commands, wait_for

#: Far more than a busy machine needs. Nothing here waits longer than it takes.
PATIENCE = 300

_IMPORTS_FOR_EVER = """
import multiprocessing, time
if multiprocessing.parent_process():
    print("importing", flush=True)
    time.sleep(3600)
def run(): pass
"""
_PARENT = """
import multiprocessing, os, sys, time
if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import for_ever
    from hf_paged_eviction_eval.worker import begin
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=begin, args=(theirs,)).start()
    ours.send((None, for_ever.run, None))
    time.sleep(3600)
"""


def test_a_worker_that_still_imports_ends_with_its_parent(tmp_path: Path) -> None:
    """On a busy machine the import of torch takes long; this one takes for ever."""
    (tmp_path / "for_ever.py").write_text(_IMPORTS_FOR_EVER)
    (tmp_path / "parent.py").write_text(_PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "importing\n"
        parent.kill()
        # The end of what they print comes when the last of the processes has ended.
        assert parent.communicate(timeout=PATIENCE)[0] == ""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    found = Commands(tmp_path_factory.mktemp("log"))
    yield found
    found.close()


@pytest.fixture
def started(commands: Commands, model_folder: str, tmp_path: Path) -> tuple[Child, list[psutil.Process]]:
    """A run in the middle of its work, and the two processes that share it."""
    words = f"eval --model {model_folder} --tasks passkey --length 400 --limit 999 --batch-size 1 --block-size 8"
    words += f" --policies paged_eviction --budgets 10% --workers 2 --device cpu --output {tmp_path}/out"
    child = commands.start(words.split())
    rows = tmp_path / "out" / "results.jsonl"
    wait_for(lambda: rows.exists() and rows.stat().st_size, PATIENCE)
    found = psutil.Process(child.pid).children()
    workers = [each for each in found if "spawn_main" in " ".join(each.cmdline())]
    assert len(workers) == 2
    return child, workers


def test_workers_end_with_a_run_that_is_killed(started: tuple[Child, list[psutil.Process]]) -> None:
    child, workers = started
    child.kill()
    assert child.wait() == -9
    assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []


def test_a_run_ends_with_a_worker_that_is_killed(started: tuple[Child, list[psutil.Process]]) -> None:
    child, workers = started
    workers[0].kill()
    assert child.wait() == 2
    assert "a worker process was killed" in child.output
    assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []

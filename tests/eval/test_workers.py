"""Processes that share a run end with it, whatever ends it, and whenever."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from processes import Child, Commands, wait_for

#: Far more than a busy machine needs. Nothing here waits longer than it takes.
PATIENCE = 300

_FOR_EVER = """
import multiprocessing, sys, time
if multiprocessing.parent_process() and sys.argv[2] == "importing":
    print("importing", flush=True)
    time.sleep(3600)
def run(*_):
    print("working", flush=True)
    time.sleep(3600)
"""
_PARENT = """
import multiprocessing, os, sys, time
if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import for_ever
    from hf_paged_eviction_eval.running.processes.worker import begin
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=begin, args=(theirs,)).start()
    ours.send((for_ever.run, ()))
    time.sleep(3600)
"""


@pytest.mark.parametrize("state", ["importing", "working"])
def test_a_worker_ends_with_its_parent(tmp_path: Path, state: str) -> None:
    """On a busy machine the import of torch takes long; this one takes for ever, and so does the work."""
    (tmp_path / "for_ever.py").write_text(_FOR_EVER)
    (tmp_path / "parent.py").write_text(_PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == f"{state}\n"
        parent.kill()
        # The end of what they print comes when the last of the processes has ended.
        assert parent.communicate(timeout=PATIENCE)[0] == ""


def start(commands: Commands, model_folder: str, folder: Path) -> tuple[Child, list[psutil.Process]]:
    """A run, and the process that shares it, as soon as it is there."""
    words = f"eval --model {model_folder} --tasks passkey --length 400 --limit 999 --batch-size 1 --block-size 8"
    words += f" --policies paged_eviction --budgets 10% --workers 2 --device cpu --output {folder}"
    child = commands.start(words.split())
    wait_for(lambda: len(workers_of(child)) == 1, PATIENCE, every=0.1)
    return child, workers_of(child)


def workers_of(child: Child) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(child.pid).children():
        with suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_workers_end_with_a_run_that_is_killed(commands: Commands, model_folder: str, tmp_path: Path) -> None:
    child, workers = start(commands, model_folder, tmp_path / "out")
    child.kill()
    assert child.wait() == -9
    assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []


def test_a_run_ends_with_a_worker_that_is_killed(commands: Commands, model_folder: str, tmp_path: Path) -> None:
    """In the middle of its work."""
    child, workers = start(commands, model_folder, tmp_path / "out")
    rows = tmp_path / "out" / "results.jsonl"
    wait_for(lambda: rows.exists() and rows.stat().st_size, PATIENCE, every=0.1)
    workers[0].kill()
    assert child.wait() == 2
    assert "a worker process was killed" in child.output
    assert psutil.wait_procs(workers, timeout=PATIENCE)[1] == []

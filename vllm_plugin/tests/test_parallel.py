"""Tensor parallelism with two processes on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes are bound to two cores")
def test_two_processes_give_what_a_cache_alone_gives() -> None:
    program = Path(__file__).with_name("two_processes.py")
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert "the same tokens" in run.stdout, run.stderr[-3000:]

"""Tensor parallelism with two processes on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes are bound to two cores")
@pytest.mark.parametrize("allocator", ["uniform", "heads:[[1.0, 0.3], [2.0, 0.7]]"])
def test_two_processes_give_what_a_cache_alone_gives(allocator: str) -> None:
    """Of heads of different size, one process has more."""
    program = Path(__file__).with_name("two_processes.py")
    run = subprocess.run([sys.executable, str(program), allocator], capture_output=True, text=True, check=False)
    assert "the same tokens" in run.stdout, run.stderr[-3000:]

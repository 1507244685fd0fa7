"""One thread per process: on a busy machine more threads make every small operator wait for the others."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "contract: the contract suite, run on every supported transformers")
    torch.set_num_threads(1)

"""As in `tests/`, with what those tests share, in an environment where the lab is installed."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/support", "lab/training", "lab/tests/fold")]

from tests.conftest import (  # noqa: E402
    own_profiles,
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    same_draws,
)

__all__ = [
    "own_profiles",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "same_draws",
]

"""As in `tests/`, with what those tests share."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from tests.conftest import (  # noqa: E402
    own_profiles,
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_teardown,
    same_draws,
)

__all__ = [
    "own_profiles",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_teardown",
    "same_draws",
]

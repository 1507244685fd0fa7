"""Blocks come from host memory a few at a time, so that the short texts of tests take several rounds."""

import pytest

from hf_paged_eviction_lab.recall import archive, recall
from tests.eval.conftest import model, showing

__all__ = ["model", "showing"]


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (archive, recall):
        monkeypatch.setattr(module, "ROUND", 3)

"""Blocks come from host memory a few at a time, so that the short texts of tests take several rounds."""

import pytest

from hf_paged_eviction.disposals.recall import archive, recall


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (archive, recall):
        monkeypatch.setattr(module, "ROUND", 3)

"""How many calls a token takes, and the trees of calls that How it works shows."""

from __future__ import annotations

import pytest

import models
from benchmarks import calls


@pytest.mark.skipif(models.VERSION < (5, 14), reason="static caches need transformers 5.14")
def test_calls_are_few_and_are_those_that_the_page_shows() -> None:
    """The limits are what a reader can follow. After a change: `python benchmarks/calls.py --docs`."""
    found = calls.runs()
    counts = {name: (len(case), len({call.file for call in case})) for name, case in found.items()}
    limits = {
        "token overwritten": (40, 9),
        "victim due": (100, 20),
        "token, static": (50, 15),
        "overflowing prompt": (100, 25),
        "prompt, snapkv@ada_kv": (155, 35),
    }
    for name, (most_calls, most_files) in limits.items():
        assert counts[name][0] <= most_calls and counts[name][1] <= most_files, f"{name}: {counts[name]}"
    page = calls.DOCS.read_text()
    assert calls.with_trees(page, found) == page

"""How many calls of the library and how many operators of torch a token takes: a slower step shows without a clock."""

from __future__ import annotations

import pytest

import models
from benchmarks import calls


@pytest.mark.skipif(models.VERSION < (5, 14), reason="static caches need transformers 5.14")
def test_calls_are_few() -> None:
    """What a reader can follow; `python benchmarks/calls.py --tree NAME` prints them."""
    limits = {
        "token overwritten": (55, 12),
        "victim due": (114, 22),
        "token, static": (72, 18),
        "overflowing prompt": (122, 28),
        "prompt, snapkv@ada_kv": (195, 39),
    }
    for name, found in calls.runs().items():
        most_calls, most_files = limits[name]
        assert 5 < len(found) <= most_calls and len({call.file for call in found}) <= most_files, name


@pytest.mark.skipif(models.VERSION < (5, 14), reason="static caches need transformers 5.14")
def test_operators_are_few() -> None:
    """With some slack: a release of transformers or torch may do with a few more."""
    limits = {
        "keydiff": (6, 14),
        "snapkv": (8, 28),
        "static": (18, 28),
        "4 bits": (120, 160),
        "shares of heads": (30, 80),
    }
    found = calls.operators()
    assert set(found) == set(limits)
    for name, (least, mean) in found.items():
        assert least <= limits[name][0] and mean <= limits[name][1], (name, least, mean)

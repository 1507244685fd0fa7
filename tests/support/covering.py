"""Fewer cases that still meet every pair of parameter values.

A test with three or more parameters runs for their whole product only under `--all-cases`. Otherwise a covering array
of it runs: each value of each parameter meets each value of every other one at least once. Nearly every bug that
depends on parameters depends on one or two of them.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

import pytest

Pair = tuple[tuple[str, int], tuple[str, int]]


def covering_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases that run: of each test as few as meet all pairs of values that its cases have."""
    cases: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.parent, getattr(item, "originalname", item.name)].append(item)
    return {item for of_one_test in cases.values() for item in _cover(of_one_test)}


def _cover(items: list[pytest.Item]) -> list[pytest.Item]:
    left = {item: _pairs(item) for item in items}
    missing = set().union(*left.values())
    if not missing:
        return items
    chosen = []
    while missing:
        best = max(left, key=lambda item: len(left[item] & missing))  # the first of several: the same in every process
        chosen.append(best)
        missing -= left.pop(best)
    return chosen


def _pairs(item: pytest.Item) -> frozenset[Pair]:
    case = getattr(item, "callspec", None)
    # The cases of a test share the objects that were listed for it, so no value has to be comparable.
    values = [] if case is None else sorted((name, id(value)) for name, value in case.params.items())
    return frozenset(combinations(values, 2)) if len(values) > 2 else frozenset()

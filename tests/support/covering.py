"""Fewer cases that still meet every pair of parameter values.

A test with three or more parameters runs for their whole product only under `--all-cases`. Otherwise a covering array
of it runs: each value of each parameter meets each value of every other one at least once. Nearly every bug that
depends on parameters depends on one or two of them.

Two marks make a test cheaper still, where other tests see to the pairs. Of a test marked `each_value_once` so many
cases run that each value is met, no pair on purpose. A value or a test marked `all_cases` waits for `--all-cases`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

import pytest

Values = tuple[tuple[str, int], ...]


def covering_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases that run: of each test as few as meet all pairs of values that its cases have."""
    cases: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("all_cases"):
            continue
        cases[item.parent, getattr(item, "originalname", item.name)].append(item)
    return {item for of_one_test in cases.values() for item in _cover(of_one_test)}


def _cover(items: list[pytest.Item]) -> list[pytest.Item]:
    left = {item: _to_meet(item) for item in items}
    missing = set().union(*left.values())
    if not missing:
        return items
    chosen = []
    while missing:
        best = max(left, key=lambda item: len(left[item] & missing))  # the first of several: the same in every process
        chosen.append(best)
        missing -= left.pop(best)
    return chosen


def _to_meet(item: pytest.Item) -> frozenset[Values]:
    """Pairs of values, or single ones, that count as met once this case runs; none if all cases shall run."""
    together = 1 if item.get_closest_marker("each_value_once") else 2
    case = getattr(item, "callspec", None)
    # The cases of a test share the objects that were listed for it, so no value has to be comparable.
    values = [] if case is None else sorted((name, id(value)) for name, value in case.params.items())
    return frozenset(combinations(values, together)) if len(values) > together else frozenset()

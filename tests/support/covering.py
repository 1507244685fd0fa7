"""Fewer cases that still meet every value of every parameter.

Products of parameters run whole only under `--all-cases`. Otherwise so many cases of a test run that each value of each
parameter meets each value of every other one at least once: nearly every bug that depends on parameters depends on one
or two of them. In rooms whose options the fuzz draws all together, and in tests marked `each_value_once`, so many run
that each value is met, no pair on purpose.

What one `parametrize` lists is one parameter: of a table no line is left out. A value or a test marked `all_cases`
waits for `--all-cases`.
"""

from collections import Counter, defaultdict
from itertools import combinations
from typing import Any

import pytest

#: Rooms where tests/fuzz draws every option with every other, and compares with a slow cache.
DRAWN = ("allocators", "cache", "contract", "disposals", "layer", "policies", "precision", "store")
Values = tuple[tuple[str, tuple[int, ...]], ...]


def covering_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases that run: of each test as few as meet all values, or pairs of values, that its cases have."""
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
    chosen, often = [], Counter[Values]()

    def worth(item: pytest.Item) -> tuple[int, int]:
        """What it meets that is missing; and rather a value that was met once than one that was met often."""
        return len(left[item] & missing), -sum(often[values] for values in left[item])

    while missing:
        best = max(left, key=worth)  # the first of several: the same in every process
        chosen.append(best)
        often.update(left[best])
        missing -= left.pop(best)
    return chosen


def _to_meet(item: pytest.Item) -> frozenset[Values]:
    """Pairs of values, or single ones, that count as met once this case runs; none if all cases shall run."""
    together = 1 if item.path.parent.name in DRAWN or item.get_closest_marker("each_value_once") else 2
    case = getattr(item, "callspec", None)
    # The cases of a test share the objects that were listed for it, so no value has to be comparable.
    left = {} if case is None else {name: id(value) for name, value in case.params.items()}
    values = []
    for mark in item.iter_markers("parametrize"):
        listed = mark.args[0]
        names = [name.strip() for name in listed.split(",")] if isinstance(listed, str) else list(listed)
        if names[0] in left:
            values.append((names[0], tuple(left.pop(name) for name in names)))
    values += [(name, (value,)) for name, value in left.items()]  # of fixtures
    return frozenset(combinations(sorted(values), together)) if len(values) > together else frozenset()

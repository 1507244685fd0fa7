"""The choice of cases that meets every pair of parameter values, or every value."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from covering import covering_cases


class Case(SimpleNamespace):
    """A namespace that may be a key, as an item of pytest may."""

    __hash__ = object.__hash__

    def get_closest_marker(self, name: str) -> object:
        return name if name in self.marks else None

    def iter_markers(self, name: str) -> list[object]:
        return [SimpleNamespace(args=(names,)) for names in self.tables]


def cases(test: str, *axes: int, marks: str = "", room: str = "eval", tables: tuple[str, ...] = ()) -> list[Any]:
    """Stand-ins for the items of one test."""
    values = [[object() for _ in range(count)] for count in axes]
    parameters = [dict(zip("abcd", chosen, strict=False)) for chosen in product(*values)]
    facts = {"parent": "file", "name": test, "marks": marks.split(), "path": Path(room, "test_one.py")}
    return [Case(callspec=SimpleNamespace(params=params), tables=tables, **facts) for params in parameters]


def pairs(items: Iterable[Any]) -> set[Any]:
    return {pair for item in items for pair in combinations(item.callspec.params.items(), 2)}


def test_every_pair_is_met_by_fewer_cases() -> None:
    whole = cases("one", 5, 4, 3, 2)
    chosen = covering_cases(whole)
    assert pairs(chosen) == pairs(whole)
    assert 20 <= len(chosen) <= 30 < len(whole) == 120


def test_each_value_once() -> None:
    whole = cases("one", 5, 4, 2, marks="each_value_once")
    chosen = covering_cases(whole)
    assert len(chosen) == 5
    assert {value for item in chosen for value in item.callspec.params.items()} == {
        value for item in whole for value in item.callspec.params.items()
    }
    single = cases("single", 7, marks="each_value_once")
    assert covering_cases(single) == set(single)
    assert len(covering_cases(cases("one", 5, 4, 2, room="contract"))) == 5


def test_no_value_stands_in_for_the_others() -> None:
    chosen = covering_cases(cases("one", 6, 2, 3, room="contract"))
    met = Counter(value for item in chosen for value in item.callspec.params.items())
    assert sorted(met.values()) == [1] * 6 + [2] * 3 + [3] * 2


def test_no_line_of_a_table_is_left_out() -> None:
    table = cases("table", 3, 3, 3, tables=("a, b, c",))
    assert covering_cases(table) == set(table)
    times = cases("table", 3, 3, 2, tables=("a, b", "c"), room="contract")
    assert len(covering_cases(times)) == 9


def test_what_waits_for_all_cases() -> None:
    now, later = cases("one", 3, 2), cases("one", 2, 2, marks="all_cases")
    assert covering_cases([*now, *later]) == set(now)

"""Tables in terminals of any width: names and numbers stay whole."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hf_paged_eviction_eval.report.means import Mean
from hf_paged_eviction_eval.report.table import Table, simple_table

NAMES = [
    "observed(weight=2)@heads(power=1.5) in 8 bits",
    "hybrid(snapkv(window=32), keydiff)@pyramid",
    "recency",
]


def shown(table: Table, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    table.show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
@pytest.mark.parametrize("columns", [3, 9])
def test_names_and_numbers_stay_whole(width: int, columns: int) -> None:
    rows = [(name, *(Mean(10 * at + 0.25, 1.5) for at in range(columns))) for name in NAMES]
    names = ("policy", *(f"task_number_{at}" for at in range(columns)))
    table = replace(simple_table("A title", names, rows), note="a note")
    lines = shown(table, width)
    assert all(len(line.rstrip()) <= width for line in lines)
    text = "\n".join(lines)
    assert "A title" in lines[0] and "a note" in text
    for name in NAMES:
        assert name in text
    words = text.split()
    for at in range(columns):
        assert words.count(f"{10 * at + 0.25:.2f}") == len(NAMES)

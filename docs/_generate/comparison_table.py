"""The comparison with other software, made of `comparison.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from writing import table

from hf_paged_eviction import available_allocators, available_modifiers, available_policies

FILE = Path(__file__).parents[1] / "comparison.yaml"
#: Answers that claim nothing and so need no source.
UNKNOWN = ("not measured", "not checked")


def load() -> dict[str, Any]:
    """The file, with every cell of others taken apart: `(answer, source or None)`."""
    # Text only: "no" is an answer here, not False.
    comparison: dict[str, Any] = yaml.load(FILE.read_text("utf-8"), Loader=yaml.BaseLoader)
    for row in comparison["rows"]:
        for peer in comparison["peers"]:
            answer, _, source = (part.strip() for part in row[peer].partition("|"))
            row[peer] = (answer, source or None)
    return comparison


def page(_: str) -> str:
    """The table, then its sources and the tests behind our column."""
    comparison = load()
    numbers = {name: at for at, name in enumerate(comparison["sources"], start=1)}
    header = ("", "this package", *comparison["peers"].values())
    rows = [
        [f"**{row['capability']}**", _ours(row), *_others(row, comparison["peers"], numbers)]
        for row in comparison["rows"]
    ]
    wide = table(header, rows, numbers_from=len(header))
    sources = "\n".join(f"{numbers[name]}. {text}" for name, text in comparison["sources"].items())
    tests = "\n".join(_tests(comparison["rows"]))
    return "\n\n".join([wide, "### Sources", sources, "### Tests behind our column", tests])


def _ours(row: dict[str, Any]) -> str:
    counts = {
        "policies": len(available_policies()),
        "modifiers": len(available_modifiers()),
        "allocators": len(available_allocators()),
    }
    files = dict.fromkeys(test.partition("::")[0] for test in row.get("tests", ()))
    names = ", ".join(f"`{Path(file).name}`" for file in files)
    return str(row["ours"]).format(**counts) + (f" ({names})" if names else "")


def _others(row: dict[str, Any], peers: dict[str, str], numbers: dict[str, int]) -> Iterator[str]:
    for peer in peers:
        answer, source = row[peer]
        yield answer + (f" [\\[{numbers[source]}\\]](#sources)" if source else "")


def _tests(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if tests := row.get("tests"):
            yield f"- {row['capability']}: " + ", ".join(f"`{test}`" for test in tests)

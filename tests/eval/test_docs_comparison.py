"""The comparison page: claims of ours are backed by tests, claims about others by a source."""

import ast
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="the extra `eval` is not installed")

ROOT = Path(__file__).parents[2]
UNKNOWN = ("not measured", "not checked")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    content: dict[str, Any] = yaml.load((ROOT / "docs" / "comparison.yaml").read_text("utf-8"), Loader=yaml.BaseLoader)
    return content


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_ours_are_backed_by_tests_that_exist(page: dict[str, Any]) -> None:
    for row in page["rows"]:
        tests = row.get("tests", [])
        answer = row["ours"].partition(",")[0]
        assert bool(tests) != (answer == "no"), f"{row['capability']}: a claim needs tests, a plain no needs none"
        for test in tests:
            file, _, function = test.partition("::")
            assert (ROOT / file).is_file(), test
            assert function in functions(ROOT / file), test


def test_theirs_have_a_source_or_claim_nothing(page: dict[str, Any]) -> None:
    used = set()
    for row in page["rows"]:
        assert set(row) - {"capability", "ours", "tests"} == set(page["peers"]), row["capability"]
        for peer in page["peers"]:
            answer, _, source = (part.strip() for part in row[peer].partition("|"))
            assert (source in page["sources"]) != (answer in UNKNOWN), f"{row['capability']}, {peer}"
            used.add(source)
    assert set(page["sources"]) <= used


def test_what_was_measured_of_others_is_in_the_results(page: dict[str, Any]) -> None:
    results = (ROOT / "docs" / "peers.json").read_text("utf-8")
    for version in ("kvpress 0.5.5", "transformers 5.2.0", "transformers 5.23.0", "torch 2.13.0"):
        assert version in results and version in page["sources"]["peers"].replace("5.23.0", "transformers 5.23.0")

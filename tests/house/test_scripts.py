"""Every name that a script takes from this project is there, also in scripts that no test can run: some need another
release of transformers, a GPU or a package that is not installed."""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "docs", "examples", "notebooks", "training", ".ci")
    for path in (ROOT / folder).rglob("*.py")
    if "_build" not in path.parts
)
PACKAGES = ("hf_paged_eviction", "hf_paged_eviction_eval", "hf_paged_eviction_serving")


def absent(path: Path, source: str) -> Iterator[str]:
    """What a script imports from this project, or from a script beside it, and is not there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not _is_there(path, node, alias.name))


def _is_there(path: Path, node: ast.ImportFrom, name: str) -> bool:
    module = str(node.module)
    if module.partition(".")[0] in PACKAGES:
        imported = importlib.import_module(module)
        inside = hasattr(imported, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
        return inside or hasattr(imported, name)
    beside = path.with_name(f"{module}.py")
    return not beside.exists() or name in _defined(beside)


def _defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imported_names_exist(path: Path) -> None:
    assert [*absent(path, path.read_text("utf-8"))] == []


def test_an_absent_name_is_found() -> None:
    script = ROOT / "benchmarks" / "peers.py"
    lines = "from hf_paged_eviction_eval.tasks.suites import expand, nothing\nfrom common import table, nowhere"
    assert [*absent(script, lines)] == ["hf_paged_eviction_eval.tasks.suites.nothing", "common.nowhere"]

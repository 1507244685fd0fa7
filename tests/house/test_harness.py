"""The harness and serving are clients of the library, and the rooms of the harness have an order."""

import ast
import functools
import graphlib
from pathlib import Path

import hf_paged_eviction_eval
from hf_paged_eviction import internals

#: Public modules, besides the names at the top.
PUBLIC = {"hf_paged_eviction", "hf_paged_eviction.testing", "hf_paged_eviction.internals", "hf_paged_eviction.version"}
HARNESS = Path(hf_paged_eviction_eval.__file__).parent
SERVING = Path(__file__).parents[2] / "serving" / "hf_paged_eviction_serving"


@functools.cache
def imports(folder: Path) -> list[tuple[Path, ast.ImportFrom | ast.Import]]:
    """All imports of a package, also in functions and for types alone."""
    return [
        (path, node)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom | ast.Import)
    ]


def inner(node: ast.ImportFrom | ast.Import) -> list[str]:
    """What an import takes from inside of the library, as module and name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("hf_paged_eviction.")]
    module = node.module or ""
    if node.level or (module != "hf_paged_eviction" and not module.startswith("hf_paged_eviction.")):
        return []
    listed = internals.WITHOUT_TORCH.get(module.removeprefix("hf_paged_eviction."), ())
    return [f"{module}.{alias.name}" for alias in node.names if module not in PUBLIC and alias.name not in listed]


def test_the_harness_is_a_client_of_the_library() -> None:
    assert len(imports(HARNESS)) > 1000
    assert {(path.name, *names) for path, node in imports(HARNESS) if (names := inner(node))} == set()


def test_serving_is_a_client_of_the_library() -> None:
    assert len(imports(SERVING)) > 100
    assert {(path.name, *names) for path, node in imports(SERVING) if (names := inner(node))} == set()


def test_the_library_and_the_harness_know_nothing_of_other_packages() -> None:
    others = "hf_paged_eviction_lab hf_paged_eviction_serving hf_paged_eviction_vllm"
    for folder in (HARNESS, Path(internals.__file__).parent):
        for path, node in imports(folder):
            taken = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(name.startswith(tuple(others.split())) for name in taken), path


def test_the_check_sees_what_is_inside() -> None:
    def seen(line: str) -> list[str]:
        (node,) = ast.parse(line).body
        assert isinstance(node, ast.ImportFrom | ast.Import)
        return inner(node)

    assert seen("from hf_paged_eviction.layer.paged import PagedLayer") == ["hf_paged_eviction.layer.paged.PagedLayer"]
    assert seen("import hf_paged_eviction.table.spans") == ["hf_paged_eviction.table.spans"]
    assert seen("from hf_paged_eviction.table.spans import Spans, read_protect") == [
        "hf_paged_eviction.table.spans.Spans"
    ]
    assert seen("from hf_paged_eviction import PagedEvictionCache") == seen("from .layer import paged") == []
    assert seen("from hf_paged_eviction.internals import feed") == seen("from hf_paged_eviction_eval import hub") == []


def test_what_is_listed_as_internal_is_used() -> None:
    """The list is as short as it can be: of the names that stand there without torch, the harness takes each."""
    taken = {
        (str(node.module).removeprefix("hf_paged_eviction."), alias.name)
        for _, node in imports(HARNESS)
        if isinstance(node, ast.ImportFrom) and not node.level
        for alias in node.names
    }
    assert {(module, name) for module, names in internals.WITHOUT_TORCH.items() for name in names} <= taken


def rooms() -> dict[str, set[str]]:
    """Room or file of the harness -> those that it imports from."""
    below: dict[str, set[str]] = {}
    for path, node in imports(HARNESS):
        if not (isinstance(node, ast.ImportFrom) and node.level):
            continue
        parts = path.relative_to(HARNESS).with_suffix("").parts
        start = [*parts[: len(parts) - node.level], *(node.module.split(".") if node.module else ())]
        targets = {start[0]} if start else {alias.name for alias in node.names}
        below.setdefault(parts[0], set()).update(targets - {parts[0], "__init__"})
    return below


def test_rooms_of_the_harness_have_an_order() -> None:
    """Of two rooms one imports from the other, or neither does."""
    below = rooms()
    assert sum(map(len, below.values())) > 40
    assert list(graphlib.TopologicalSorter(below).static_order())  # a CycleError names the rooms

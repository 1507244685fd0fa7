"""What users and maintainers rely on without looking: tests that check something, one version, no foreign code."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hf_paged_eviction
import hf_paged_eviction_eval

ROOT = Path(__file__).parents[2]
#: Those of this package and of serving.
TESTS = [path for folder in ("tests", "serving/tests") for path in (ROOT / folder).rglob("*.py")]
RAISING = {"raises", "warns", "fail", "deprecated_call"}
#: A notebook's client raises what a cell raises.
RAISES_ITSELF = {"execute"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@dataclass
class Module:
    """The functions of a file in `tests/`, and where its other names come from."""

    functions: dict[str, list[Function]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Module:
        module = cls()
        for node in ast.walk(parsed(path)):
            if isinstance(node, Function):
                module.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Import):
                module.modules.update({alias.asname or alias.name: alias.name for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and not node.level:
                module.names.update(
                    {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
                )
        return module


def checks(module: str, function: str, seen: frozenset[tuple[str, str]] = frozenset()) -> bool:
    """Whether a function, or a helper in `tests/` that it calls, asserts or expects an error."""
    if module not in modules() or (module, function) in seen:
        return False
    seen |= {(module, function)}
    return any(
        isinstance(part, ast.Assert) or (isinstance(part, ast.Call) and _call_checks(module, part.func, seen))
        for node in modules()[module].functions.get(function, [])
        for part in ast.walk(node)
    )


def _call_checks(module: str, called: ast.expr, seen: frozenset[tuple[str, str]]) -> bool:
    here = modules()[module]
    if isinstance(called, ast.Name):
        return checks(module, called.id, seen) or checks(*here.names.get(called.id, ("", "")), seen)
    if not isinstance(called, ast.Attribute):
        return False
    owner = called.value.id if isinstance(called.value, ast.Name) else ""
    if called.attr in RAISING:
        return owner == "pytest"
    if called.attr in RAISES_ITSELF or called.attr.startswith("assert_"):
        return True
    if owner in here.modules:
        return checks(here.modules[owner], called.attr, seen)
    # A method of a helper of this file.
    return checks(module, called.attr, seen)


@functools.cache
def modules() -> dict[str, Module]:
    return {path.stem: Module.read(path) for path in TESTS}


def all_tests() -> Iterator[tuple[str, str]]:
    for name, module in modules().items():
        if name.startswith("test_"):
            yield from ((name, function) for function in module.functions if function.startswith("test_"))


def test_every_test_checks_something() -> None:
    tests = list(all_tests())
    assert len(tests) > 500, "the tests were not found"
    assert [f"{module}.{name}" for module, name in tests if not checks(module, name)] == []


def test_basenames_are_unique() -> None:
    """Without packages in `tests/`, two files of one name hide each other."""
    names = [path.stem for path in TESTS if path.stem != "conftest"]
    assert sorted(set(names)) == sorted(names)


def test_one_version() -> None:
    """Everywhere the same, the packages beside this one name it, and the changelog speaks of it."""
    places = {"pyproject.toml": r'^version = "(.+)"$', "CITATION.cff": r"^version: (.+)$"}
    for path in ROOT.glob("*/pyproject.toml"):
        name = str(path.relative_to(ROOT))
        places |= {name: r'^version = "(.+)"$'}
        assert f'"hf_paged_eviction=={hf_paged_eviction.__version__}"' in path.read_text("utf-8"), name
    for name, pattern in places.items():
        (version,) = re.findall(pattern, (ROOT / name).read_text("utf-8"), re.MULTILINE)
        assert version.strip('"') == hf_paged_eviction.__version__, name
    assert re.search(rf"\b{re.escape(hf_paged_eviction.__version__)}\b", (ROOT / "CHANGELOG.md").read_text("utf-8"))


def test_no_page_has_a_gap() -> None:
    """A number that was to be filled in later must not be published as its placeholder."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    gaps = re.compile(r"@@|\b(TODO|FIXME|XXX)\b")
    pages_with_gaps = {path.name: lines for path in pages if (lines := gaps.findall(path.read_text("utf-8")))}
    assert len(pages) > 10 and not pages_with_gaps


def test_mutants_are_tested_by_tests_that_exist() -> None:
    selection = re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / "setup.cfg").read_text("utf-8"))
    gone = [test for path, test in selection if f"def {test}(" not in (ROOT / path).read_text("utf-8")]
    assert selection and not gone


def _imports(package: Path) -> dict[str, set[str]]:
    """By module, the modules of the same package that it names in any import, also in functions and for types alone."""
    paths = {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}
    rooms = {name.removesuffix("__init__").rstrip("."): name for name in paths if name.endswith("__init__")}
    imported: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported[name] = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.level:
                room = name.split(".")[: -node.level]
                start = [*room, *(node.module or "").split(".")] if node.module else room
                for target in (".".join([*start, alias.name]) for alias in node.names):
                    near = target if target in paths or target in rooms else ".".join(start)
                    imported[name].add(rooms.get(near, near))
    return imported


def _reached(imports: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    left = [start]
    while left:
        new = imports.get(left.pop(), set()) - reached
        reached |= new
        left.extend(new)
    return reached


def test_no_circle_of_imports() -> None:
    """Arrows between modules run in one direction."""
    packages = [Path(package.__file__).parent for package in (hf_paged_eviction, hf_paged_eviction_eval)]
    for package in (*packages, ROOT / "serving" / "hf_paged_eviction_serving"):
        imports = _imports(package)
        assert sum(map(len, imports.values())) > 30
        assert [name for name in imports if name in _reached(imports, name)] == [], package.name


def test_rooms_have_an_order() -> None:
    """Of two folders of the library one imports from the other, or neither does."""
    package = Path(hf_paged_eviction.__file__).parent
    below: dict[str, set[str]] = {}
    for name, targets in _imports(package).items():
        room = name.partition(".")[0]
        others = {target.partition(".")[0] for target in targets} - {room, "__init__"}
        below.setdefault(room, set()).update(others)
    assert sum(map(len, below.values())) > 50
    assert list(graphlib.TopologicalSorter(below).static_order())  # a CycleError names the rooms


#: Modules of the harness that need none of the packages that only the harness needs.
BARE = {"hf_paged_eviction_eval", "hf_paged_eviction_eval.tasks"}


def test_tests_of_the_library_need_nothing_of_the_harness() -> None:
    """`make test-bare` collects them where its packages are not installed."""
    (rooms,) = re.findall(r"addprefix tests/,([\w ]+)\)", (ROOT / "Makefile").read_text("utf-8"))
    files = [path for room in rooms.split() for path in (ROOT / "tests" / room).rglob("*.py")]
    assert len(files) > 50
    for path in files:
        for node in parsed(path).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_paged_eviction_eval"):
                names = (
                    {alias.name for alias in node.names} if node.module == "hf_paged_eviction_eval" else {"embedded"}
                )
                assert node.module in BARE and names == {"embedded"}, path

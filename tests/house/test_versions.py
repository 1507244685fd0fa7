"""What says which releases are supported says what `integration/versions.py` says; workflows call what exists."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hf_paged_eviction.integration.versions import NEWEST, OLDEST, TORCH, TRANSFORMERS

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHON = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))[0]


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_pages_name_the_supported_releases() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    texts = [" ".join(page.read_text("utf-8").split()) for page in pages if "_build" not in page.parts]
    for page in texts:
        assert set(re.findall(r"transformers (\d\S+) to (\d\S+\d)", page)) <= {(OLDEST, NEWEST)}
        assert set(re.findall(r"transformers (\d+\.\d+\.\d+) or later", page)) <= {OLDEST}
        assert set(re.findall(r"torch (\d\S+) to (\d\S*\d)", page)) <= {TORCH}
        assert set(re.findall(r"Python (\d\.\d+) or later, transformers", page)) <= {PYTHON}
    assert f"transformers {OLDEST} to {NEWEST}, torch {' to '.join(TORCH)}" in texts[0]


def test_packaging_and_constraints_agree() -> None:
    dependencies = read("pyproject.toml")
    assert f'"transformers>={OLDEST},<{int(NEWEST.split(".")[0]) + 1}"' in dependencies
    assert f'"torch>={TORCH[0]}"' in dependencies
    assert f"\ntransformers=={NEWEST}\n" in read(".ci/constraints.txt")
    releases = [tuple(map(int, release.split("."))) for release in TRANSFORMERS]
    assert releases == sorted(set(releases))


def test_the_makefile_reads_them() -> None:
    """It does so with sed: each tuple stands on a line of its own."""
    lines = read("hf_paged_eviction/integration/versions.py").splitlines()
    for name in re.findall(r"call named,(\w+)", read("Makefile")):
        assert sum(line.startswith(f"{name} = (") and line.endswith(")") for line in lines) == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile_and_nothing_else(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        assert matrix.get("python", [PYTHON])[0] == PYTHON
        assert set(matrix.get("target", [])) <= targets
        for command in (step["run"] for step in job["steps"] if "run" in step):
            assert command in (".ci/run", "make ${{ matrix.target }}") or command.split()[1] in targets
            assert command == ".ci/run" or command.startswith("make ")


@pytest.fixture(scope="module")
def canary() -> ModuleType:
    spec = importlib.util.spec_from_file_location("canary", ROOT / ".ci" / "canary.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_canary_says_which_release_is_new(canary: ModuleType) -> None:
    as_pinned = canary.pinned() | {"torch": canary.pinned()["torch"] + "+cpu", "pip": "1.0"}
    assert canary.changes(as_pinned) == []
    assert "not a new release" in canary.verdict(as_pinned)
    newer = as_pinned | {"transformers": "9.9.9", "huggingface-hub": "8.8.8"}
    assert len(canary.changes(newer)) == 2
    assert f"transformers: {NEWEST} pinned, 9.9.9 installed" in canary.verdict(newer)
    assert (ROOT / canary.TESTS[0]).exists()

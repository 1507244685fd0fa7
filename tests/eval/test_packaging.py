"""What ends up in a wheel and a source distribution, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="the extra `dev` is not installed")

ROOT = Path(__file__).parents[2]
SOURCES = {
    "hf_paged_eviction": "hf_paged_eviction",
    "eval": "hf_paged_eviction_eval",
}
SHIPPED = (".py", ".c", ".json")
IGNORED = shutil.ignore_patterns(".*", "build", "dist", "results", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build in a copy, so that nothing is left in the tree: the source distribution, and the wheel from it."""
    tree = tmp_path_factory.mktemp("tree") / "copy"
    shutil.copytree(ROOT, tree, ignore=IGNORED)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "dist"


def expected_files() -> set[str]:
    names = set()
    for folder, package in SOURCES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and (
                path.suffix in SHIPPED
                or path.name in ("py.typed", "NOTICE")
                or path.parent.name in ("model", "published")
            ):
                names.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return names


def test_wheel_holds_these_packages_and_no_other(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "paged-eviction = hf_paged_eviction_eval.cli:main" in archive.read(entry_points).decode()
    code = {name for name in names if ".dist-info/" not in name}
    assert code == expected_files()
    for licence in ("licenses/LICENSE", "licenses/eval/data/longbench/NOTICE"):
        assert any(name.endswith(licence) for name in names)


def test_source_distribution_builds_that_wheel(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "setup.cfg", "eval/py.typed"} <= names

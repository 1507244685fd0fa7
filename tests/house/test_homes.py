"""Tests leave alone what belongs to whoever runs them; one that does not fails."""

import os
import subprocess
import sys
from pathlib import Path

import homes
from hf_paged_eviction.learned.lookup import profile_dir

ROOT = Path(__file__).parents[2]
_CONFTEST = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "support")!r}]
from tests.conftest import own_profiles, pytest_addoption
"""
_TESTS = """
import os, subprocess, sys
from contextlib import suppress
from pathlib import Path
from hf_paged_eviction.learned.lookup import profile_dir

REAL = Path({real!r})

def read():
    with suppress(Exception):
        (REAL / ".cache/hf_paged_eviction/calibrations/a.safetensors").open("rb").close()

def test_reads():
    read()

def test_lists():
    with suppress(Exception):
        list((REAL / "elsewhere").iterdir())

def test_writes_in_a_child():
    code = f"import pathlib; pathlib.Path({{str(REAL)!r}}, '.config/new').mkdir(parents=True)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode

def test_prepares():
    assert not profile_dir().exists()
    profile_dir().mkdir(parents=True)

def test_prepares_too():
    assert not profile_dir().exists()
    assert Path.home() != REAL and (REAL / "own").read_text() == "mine"
"""


def test_a_test_that_touches_the_real_home_fails(tmp_path: Path) -> None:
    real, folder = tmp_path / "real", tmp_path / "tests"
    profiles = real / ".cache" / "hf_paged_eviction" / "calibrations"
    for path in (profiles, real / "elsewhere", folder):
        path.mkdir(parents=True)
    (profiles / "a.safetensors").touch()
    (real / "own").write_text("mine")
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_it.py").write_text(_TESTS.format(real=str(real)))
    before = sorted(real.rglob("*"))
    left_out = {*homes.VARIABLES, "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HOME": str(real), "HF_HOME": str(real / "elsewhere")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    wrong = [line.partition(" - ")[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    names = ("reads", "lists", "writes_in_a_child")
    assert wrong == [f"ERROR test_it.py::test_{name}" for name in names], done.stdout + done.stderr
    assert "5 passed, 3 errors" in done.stdout
    assert sorted(real.rglob("*")) == before


def test_processes_have_the_home_of_the_tests() -> None:
    code = "from hf_paged_eviction.learned.lookup import profile_dir; print(profile_dir())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert shown == str(profile_dir()) and Path(shown).is_relative_to(Path.home())
    assert not Path(shown).exists()

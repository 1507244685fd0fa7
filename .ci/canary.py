"""What somebody gets who installs this today: the wheel in an empty environment, without constraints.

There the Python blocks of README.md run, and a part of the contract suite. `make test-canary` and `make test-next` call

    python .ci/canary.py FOLDER TORCH [--pre]

FOLDER is made anew. TORCH is the requirement that stands for torch: `torch` for the newest one. `--pre` takes
pre-releases of all packages. Where anything fails, it says which versions differ from those in `.ci/constraints.txt`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: About a minute of the contract suite: promises 1 to 3 of docs/correctness.md.
TESTS = tuple(f"tests/contract/test_{name}.py" for name in ("same_as_dynamic", "exact", "rows"))
#: README leaves the model and its inputs to the reader, and says what older releases call the argument.
READER = """
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded

model, tokenizer = embedded.load()
report = "The cache holds fewer tokens than were read. " * 200
inputs = tokenizer(report, return_tensors="pt")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("torch")
    parser.add_argument("--pre", action="store_true")
    options = parser.parse_args()
    folder = options.folder.absolute()
    python = folder / "bin" / "python"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run(sys.executable, "-m", "venv", folder)
        install(python, options.torch, options.pre)
        installed = versions(python)
        print_versions(installed)
        if options.pre and not any(
            re.search("a|b|rc|dev", version.partition("+")[0]) for version in installed.values()
        ):
            print("No package has a pre-release that pip would take: there is nothing to test.")
            return 0
        run_readme(python, folder)
        run(folder / "bin" / "pytest", "-q", "-n", "2", "-o", "pythonpath=tests tests/support", *TESTS, cwd=ROOT)
    except (subprocess.CalledProcessError, WrongOutputError) as error:
        print(f"\n{error}\n\n{verdict(versions(python))}", file=sys.stderr)
        return 1
    return 0


class WrongOutputError(Exception):
    """A block of the README prints something else than it says there."""


def environment() -> dict[str, str]:
    """One thread per process, and nothing is imported but what is installed."""
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": ""}


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command to its end.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment(), check=True)


def install(python: Path, torch: str, pre: bool) -> None:
    """Build the wheel from a clean tree and install it with what it needs and what the tests need."""
    build, wheels = ROOT / "build", python.parents[1] / "wheels"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    shutil.rmtree(build, ignore_errors=True)
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT)
    shutil.rmtree(build, ignore_errors=True)
    (wheel,) = wheels.glob("hf_paged_eviction-*.whl")
    flags = ["--pre"] if pre else []
    run(*pip, "install", "--quiet", *flags, f"{wheel}[eval]", torch, "pytest", "pytest-xdist", "hypothesis")


def versions(python: Path) -> dict[str, str]:
    """Version of each package that is installed, by its name in lower case with dashes."""
    listing = [str(python), "-m", "pip", "list", "--disable-pip-version-check", "--format", "json"]
    packages = json.loads(subprocess.run(listing, capture_output=True, text=True, check=True).stdout)
    return {normal(package["name"]): package["version"] for package in packages}


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """Version of each package in the constraints."""
    lines = (ROOT / ".ci" / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {normal(name): version for name, version in pairs}


def changes(installed: dict[str, str]) -> list[str]:
    """What is installed in another version than the constraints name; a build such as `+cpu` does not count."""
    wanted = pinned()
    return [
        f"{name}: {wanted[name]} pinned, {version} installed"
        for name, version in installed.items()
        if name in wanted and version.partition("+")[0] != wanted[name]
    ]


def print_versions(installed: dict[str, str]) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    rest = " ".join(f"{name}=={version}" for name, version in installed.items())
    print(f"Python {python}, transformers {installed['transformers']}, torch {installed['torch']}\n{rest}", flush=True)


def verdict(installed: dict[str, str]) -> str:
    """The sentence for whoever finds this failed while everything before it passed."""
    if differing := changes(installed):
        return "A new release broke us, if all that ran with the pinned versions passed:\n  " + "\n  ".join(differing)
    return "No version differs from .ci/constraints.txt: this is not a new release. Look at the wheel."


def run_readme(python: Path, folder: Path) -> None:
    """Run the Python blocks of README.md and compare what they print with the text that stands below them."""
    readme = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", readme, re.MULTILINE | re.DOTALL)
    script, expected = folder / "readme.py", "".join(text for _, text in blocks)
    code = "\n".join(code for code, _ in blocks).replace("cache=cache", "**{CACHE_ARGUMENT: cache}")
    script.write_text(READER + code, "utf-8")
    command = [str(python), "-W", "error::FutureWarning", str(script)]
    home = {"HF_PAGED_EVICTION_HOME": str(folder / "home")}  # for the profile that is measured
    printed = subprocess.run(
        command, cwd=folder, env=environment() | home, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    if printed != expected:
        raise WrongOutputError(f"The blocks of README.md printed\n{printed}where it says\n{expected}")
    print(f"README.md: {len(blocks)} blocks ran and printed what it says.", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""One thread per process: on a busy machine more threads make every small operator wait for the others."""

import gc
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

sys.path.insert(0, str(Path(__file__).parent / "support"))

import homes
from covering import covering_cases

homes.move()  # before libraries look for the real one

gc.set_threshold(100_000, 20, 20)  # with as many new objects as usual, searches for unreachable ones take a twentieth

if find_spec("hypothesis"):  # the contract suite goes without
    from hypothesis import HealthCheck, settings

    # The same examples in every run, however long a busy machine takes for one.
    settings.register_profile(
        "fixed", max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run whole products of parameters, not only enough cases to meet every value: see support/covering.py",
    )
    parser.addoption(
        "--device",
        default="cpu",
        help="where tests/contract runs: cuda, or pretend, a CPU that refuses what an accelerator would",
    )


def _check_installation() -> None:
    """Entry points of an editable installation are as old as the installation."""
    wanted = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
    groups = {**wanted.get("entry-points", {}), "console_scripts": wanted["scripts"]}
    for entry in distribution("hf_paged_eviction").entry_points:
        if entry.name not in groups.get(entry.group, {}):
            raise pytest.UsageError(
                f"The installation is older than pyproject.toml, which has no entry point {entry.name!r} of "
                f"{entry.group!r}: install again (pip install --no-deps --no-build-isolation -e .), or take the line "
                "out of hf_paged_eviction.egg-info/entry_points.txt."
            )


def pytest_configure(config: pytest.Config) -> None:
    _check_installation()
    config.addinivalue_line("markers", "contract: the contract suite, run on every supported transformers")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # this process runs tests
        import torch

        torch.set_num_threads(1)
        if (device := config.getoption("device")) != "cpu":
            import device as place

            place.use(device)


@pytest.fixture(autouse=True)
def own_profiles() -> Iterator[None]:
    """No test finds the profiles of another, and none touches the home or the caches of whoever runs it."""
    with homes.own_profiles():
        yield


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws does not depend on the tests before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One for all files: what it imports takes seconds."""
    from processes import Commands

    runner = Commands(tmp_path_factory.mktemp("log"))
    yield runner
    runner.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-cases"):
        return
    chosen = covering_cases(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish() -> None:
    """What is there by now stays: no search for unreachable circles need go through it again, a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor through what a file's tests imported and compiled: each request served in a batch ends in such a search."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()

"""Tests, and the processes that they start, have a home and caches of their own, and cannot open the real ones.

Python reports each file that it opens to an audit hook. The hook refuses what lies in the real folders and writes it
down, so that the test fails even if the error was caught. `children/sitecustomize.py` installs it in child processes.
"""

import atexit
import json
import os
import pwd
import shutil
import site
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

#: The variable for the folder of profiles.
PROFILES = "HF_PAGED_EVICTION_HOME"
#: Variables that name a folder, and their place in the home of the tests.
_FOLDERS = {
    "HOME": "",
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
    "HF_HOME": ".cache/huggingface",
    PROFILES: ".cache/hf_paged_eviction",
}
#: Variables that name a folder or a file which is otherwise in one of those.
_PARTS = (
    *(f"HF_{name}_CACHE" for name in ("ASSETS", "DATASETS", "EVALUATE", "HUB", "METRICS", "MODULES", "XET")),
    *("HUGGINGFACE_HUB_CACHE", "HUGGINGFACE_ASSETS_CACHE", "TRANSFORMERS_CACHE", "HF_TOKEN_PATH"),
    *("MPLCONFIGDIR", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_HOME", "TRITON_CACHE_DIR"),
    *("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "PIP_CONFIG_FILE"),
)
#: The real folders, for the processes that a test starts, and where a process writes down what it was refused.
_REAL, _REFUSED = "HF_PAGED_EVICTION_TESTS_REAL", "HF_PAGED_EVICTION_TESTS_REFUSED"
#: All that this module sets or removes.
VARIABLES = (*_FOLDERS, *_PARTS, _REAL, _REFUSED)
#: Events of Python's audit whose first argument is a path.
_CHANGES = ("link", "listdir", "mkdir", "remove", "rename", "rmdir", "scandir", "symlink")
_EVENTS = frozenset(("open", *(f"os.{name}" for name in _CHANGES)))
_NUMBERS = count()


def move() -> None:
    """Give this process and those that it starts a home of their own, once; before libraries look for the real one."""
    if _REAL not in os.environ:
        os.environ[_REAL] = json.dumps(_real_folders())
        if site.ENABLE_USER_SITE:
            os.environ["PYTHONUSERBASE"] = site.getuserbase()
        home = Path(tempfile.mkdtemp(prefix="home-of-tests-"))
        atexit.register(_remove, home, os.getpid())
        for name in _PARTS:
            os.environ.pop(name, None)
        os.environ.update({name: str(home / place) for name, place in _FOLDERS.items()})
        children = str(Path(__file__).parent / "children")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (children, os.environ.get("PYTHONPATH"))))
    os.environ[_REFUSED] = str(Path(os.environ["HOME"]) / f"refused-{os.getpid()}")  # each worker has its own
    guard()


def _real_folders() -> list[str]:
    """Beginnings of the paths where the settings, caches and tokens of whoever runs the tests lie."""
    folders = [os.environ[name] for name in (*_FOLDERS, *_PARTS) if name != "HOME" and os.environ.get(name)]
    homes = {os.path.expanduser("~"), pwd.getpwuid(os.getuid()).pw_dir}
    ways = (os.path.abspath, os.path.realpath)
    beginnings = [os.path.join(way(folder), "") for way in ways for folder in folders]
    return sorted({*beginnings, *(os.path.join(way(home), ".") for way in ways for home in homes)})


def _remove(home: Path, owner: int) -> None:
    if os.getpid() == owner:  # and no process that was forked from it
        shutil.rmtree(home, ignore_errors=True)


def guard() -> None:
    """Refuse to open what lies in the real folders, from here on, except what Python itself needs of it."""
    real, record = tuple(json.loads(os.environ[_REAL])), os.environ[_REFUSED]
    needed = [sys.prefix, sys.base_prefix, tempfile.gettempdir(), str(Path(__file__).parents[2]), *sys.path]
    allowed = tuple(
        folder for folder in (os.path.join(os.path.abspath(path), "") for path in needed) if folder.startswith(real)
    )

    def check(event: str, arguments: tuple[object, ...]) -> None:
        if event not in _EVENTS or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.join(os.path.abspath(os.fsdecode(arguments[0])), "")
        if path.startswith(real) and not path.startswith(allowed):
            with open(record, "a", encoding="utf-8") as file:
                file.write(f"{event} {path[:-1]}\n")
            raise RuntimeError(f"A test may not touch {path[:-1]}, which belongs to whoever runs it.")

    sys.addaudithook(check)


@contextmanager
def own_profiles() -> Iterator[None]:
    """For one test: a folder of profiles of its own, which is made when it is needed.

    Raises:
        AssertionError: the test, or a process that it started, touched the real folders.
    """
    before = os.environ[PROFILES]
    os.environ[PROFILES] = f"{before}-{os.getpid()}-{next(_NUMBERS)}"
    try:
        yield
    finally:
        os.environ[PROFILES] = before
    record = Path(os.environ[_REFUSED])
    if record.exists():
        refused = record.read_text("utf-8")
        record.unlink()
        raise AssertionError(f"The test touched what belongs to whoever runs it:\n{refused}")

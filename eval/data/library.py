"""Source text of Python's standard library: real text that is on every machine that runs this package."""

from __future__ import annotations

import re
import sysconfig
from functools import lru_cache
from pathlib import Path

HELD_OUT: tuple[str, ...] = tuple(
    """
    calendar contextlib csv fractions graphlib heapq queue sched shlex statistics textwrap zipapp
    """.split()
)
"""Modules the embedded model was never trained on: for perplexity and the `next_line` task."""

FILLER: tuple[str, ...] = tuple(
    """
    abc argparse ast base64 bdb bisect cmd code codecs configparser copy dataclasses difflib dis doctest
    enum filecmp fileinput fnmatch ftplib functools getopt gettext glob gzip hmac inspect io ipaddress
    locale mailbox netrc optparse os pathlib pickle platform plistlib pprint random reprlib selectors
    shelve shutil smtplib socket socketserver ssl string subprocess tarfile tempfile threading timeit
    tokenize trace traceback types typing uuid warnings wave weakref zipfile
    """.split()
)
"""Modules whose lines fill the haystacks. They exist from Python 3.10 to 3.14, as a file or as a package."""

_LONGEST_LINE = 100


def root() -> Path:
    """The folder of the standard library of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


@lru_cache(maxsize=256)
def source(module: str) -> str:
    """The text of one module; for a package the text of its `__init__.py`."""
    for path in (root() / f"{module}.py", root() / module / "__init__.py"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(
        f"no source of the standard library module {module!r} under {root()}: the tasks take real text from there, "
        "so install the interpreter with its .py files"
    )


def split_lines(text: str) -> list[str]:
    """Non-blank lines, each with the newlines before it, so that no token spans two of them."""
    lines = re.findall(r"\n+[^\n]+", "\n" + re.sub(r"[ \t\f]+(?=\n)", "", text.replace("\t", "    ")))
    return ["\n" * min(2, len(line) - len(line.lstrip("\n"))) + line.lstrip("\n") for line in lines]


@lru_cache(maxsize=256)
def filler_lines(module: str) -> tuple[str, ...]:
    """Lines of one module that are short enough to be filler."""
    return tuple(line for line in split_lines(source(module)) if len(line) <= _LONGEST_LINE)


def held_out_texts() -> dict[str, str]:
    """Source of the held-out standard library modules by name (it differs a little between Python versions)."""
    return {module: source(module) for module in HELD_OUT}

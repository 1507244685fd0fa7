"""The command, without a process of its own."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from hf_paged_eviction_eval.commands import main


@dataclass(frozen=True)
class Result:
    """What a command has printed, and how it ended."""

    stdout: str
    stderr: str
    output: str
    exit_code: int


class Stream(io.StringIO):
    """What is written to it is written to all."""

    def __init__(self, both: io.StringIO) -> None:
        super().__init__()
        self.both = both

    def write(self, text: str) -> int:
        self.both.write(text)
        return super().write(text)


def invoke(*arguments: object, stdin: str = "", columns: int = 200) -> Result:
    """Run a command; errors that it does not show to the user are raised here."""
    both, status = io.StringIO(), 0
    out, err = Stream(both), Stream(both)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main(list(map(str, arguments)))
        except SystemExit as end:
            status = int(end.code or 0)
    return Result(out.getvalue(), err.getvalue(), both.getvalue(), status)


def run(*arguments: object, stdin: str = "", status: int = 0, columns: int = 200) -> Result:
    """The same, where it ends with this status."""
    result = invoke(*arguments, stdin=stdin, columns=columns)
    assert result.exit_code == status, result.output
    return result

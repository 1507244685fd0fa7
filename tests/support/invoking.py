"""The command, without a process of its own."""

from typing import Any

from typer.testing import CliRunner

from hf_paged_eviction_eval.commands import app


def run(*arguments: object, stdin: str | bytes | None = None, status: int = 0, columns: int = 200) -> Any:
    """Its result; errors that it does not show to the user are raised here."""
    result = CliRunner().invoke(app, [*map(str, arguments)], input=stdin, env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result

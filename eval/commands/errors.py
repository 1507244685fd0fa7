"""Mistakes of a user, shown as one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from ..errors import UserError


@contextmanager
def plain_errors() -> Iterator[None]:
    """Show a mistake of the user without a traceback, exit status 2."""
    try:
        yield
    except UserError as error:
        from ..distributed import speaker

        who = speaker(error)
        if who is not None:
            text = f"{who}error: {error}"
            console = Console(stderr=True, soft_wrap=True)
            console.print(text, style="red", markup=False, highlight=False, emoji=False)  # "fold:x:" is no picture
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues where it was", err=True)
        raise typer.Exit(130) from None

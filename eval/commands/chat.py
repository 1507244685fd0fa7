"""`paged-eviction chat`."""

from __future__ import annotations

import typer

from ..options.chat import ChatOptions

EPILOG = """[bold]Examples[/]

A conversation that tells facts and asks for them later, on the small model that ships with the package; then yours

  paged-eviction chat --demo --policy keydiff

The same, with a full cache that answers too, and a map of what is held

  paged-eviction chat --demo --full --prompt /blocks

Another model, with a system prompt that is never evicted

  paged-eviction chat --model Qwen/Qwen3-4B --budget 2048 --policy snapkv --system @rules.txt --protect system,last_user

About a text that `paged-eviction compress` has read

  paged-eviction chat --context book.safetensors

One answer per line

  paged-eviction chat --model Qwen/Qwen3-4B < questions.txt > answers.txt
"""


def chat(options: ChatOptions) -> None:
    """Talk to a model and see what its cache holds, token by token.

    Messages come from the keyboard, from --prompt, or from a pipe: one per line, and every line of output an answer.
    """
    from ..chat.session import run_chat

    try:
        run_chat(options)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None

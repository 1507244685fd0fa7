"""`paged-eviction chat`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from .errors import plain_errors
from .options import (
    MODEL,
    AllowPickle,
    DeviceMap,
    DeviceName,
    Dtype,
    Heads,
    Precision,
    Revision,
    TokenizerName,
    TrustRemoteCode,
)

EPILOG = """[bold]Examples[/]

A conversation that tells facts and asks for them later, on the small model that ships with the package; then yours

  paged-eviction chat --demo --policy keydiff

The same, with a full cache that answers too, and a map of what is held

  paged-eviction chat --demo --full --prompt /blocks

Another model, with a system prompt that is never evicted

  paged-eviction chat --model Qwen/Qwen3-4B --budget 2048 --policy snapkv --system @rules.txt --protect-system

One answer per line

  paged-eviction chat --model Qwen/Qwen3-4B < questions.txt > answers.txt
"""
CACHE, ANSWERS, INPUT = "Cache", "Answers", "Messages"


@dataclass(frozen=True)
class ChatOptions:
    """What was typed."""

    model: Annotated[
        str,
        typer.Option(
            rich_help_panel=MODEL,
            help="A folder or a name on the Hugging Face Hub; embedded is the small model that ships with the package.",
        ),
    ] = "embedded"
    revision: Revision = None
    tokenizer: TokenizerName = None
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    dtype: Precision = Dtype.auto
    attn_implementation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=MODEL,
            help="If not given: paged_eviction where the policy needs to see queries, else the model's default.",
        ),
    ] = None
    device: DeviceName = None
    device_map: Annotated[
        DeviceMap | None, typer.Option(rich_help_panel=MODEL, help="auto: layers split over all devices.")
    ] = None

    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=CACHE,
            help="Tokens held per layer, a multiple of the block size.",
            show_default="1024, 256 for the embedded model",
        ),
    ] = None
    block_size: Annotated[int, typer.Option(min=1, rich_help_panel=CACHE, help="Tokens per block.")] = 16
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=CACHE,
            help="One of `paged-eviction policies`, with parameters, modifiers and an allocator: snapkv(window=16), "
            "caote(h2o), h2o@pyramid.",
        ),
    ] = "paged_eviction"
    heads: Annotated[
        Heads, typer.Option(rich_help_panel=CACHE, help="One decision for all KV heads of a layer, or one for each.")
    ] = Heads.shared
    sink_tokens: Annotated[
        int | None,
        typer.Option(
            min=0, rich_help_panel=CACHE, help="First tokens that are never evicted.", show_default="one block"
        ),
    ] = None
    prefill_chunk_size: Annotated[
        int,
        typer.Option(
            min=1,
            rich_help_panel=CACHE,
            help="Most tokens per forward while a message is read: bounds the memory of long ones.",
        ),
    ] = 512
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            rich_help_panel=CACHE,
            help="A full cache answers too, from the same tokens; it reads the whole conversation again every time.",
        ),
    ] = False

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=ANSWERS,
            help="Most tokens of an answer.",
            show_default="512, 32 for the embedded model",
        ),
    ] = None
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            rich_help_panel=ANSWERS,
            help="0 takes the likeliest token. Above, tokens are drawn, other settings as the checkpoint says.",
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, rich_help_panel=ANSWERS, help="Share of the probability that is drawn from."),
    ] = 1.0
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=ANSWERS, help="Of what is drawn, and of --demo.")] = 0

    system: Annotated[
        str | None, typer.Option(metavar="TEXT|@FILE", rich_help_panel=INPUT, help="The system message.")
    ] = None
    protect_system: Annotated[
        bool, typer.Option("--protect-system", rich_help_panel=INPUT, help="The system message is never evicted.")
    ] = False
    chat_template: Annotated[
        bool,
        typer.Option(
            "--chat-template/--no-chat-template",
            rich_help_panel=INPUT,
            help="Messages in the tokenizer's chat template, where it has one, or as plain text.",
        ),
    ] = True
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT|@FILE",
            rich_help_panel=INPUT,
            help="A message instead of the keyboard; several are sent one after the other. /commands work too.",
        ),
    ] = None
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", rich_help_panel=INPUT, help="Begin with a built-in conversation: facts, filler, questions."
        ),
    ] = False


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("chat", epilog=EPILOG)(chat)


def chat(**typed: Any) -> None:
    """Talk to a model and see what its cache holds, token by token.

    Messages come from the keyboard, from --prompt, or from a pipe: one per line, and every line of output an answer.
    """
    with plain_errors():
        from ..chat.session import run_chat

        try:
            run_chat(ChatOptions(**typed))
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None


def _signature() -> inspect.Signature:
    hints = get_type_hints(ChatOptions, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(each.name, keyword, default=each.default, annotation=hints[each.name])
            for each in fields(ChatOptions)
        ]
    )


# The options are written down once, as fields: the command line reads them here.
chat.__signature__ = _signature()  # type: ignore[attr-defined]
chat.__annotations__ = get_type_hints(ChatOptions, include_extras=True)

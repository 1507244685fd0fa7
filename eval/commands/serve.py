"""`paged-eviction serve`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from .errors import plain_errors

EPILOG = """[bold]Examples[/]

  paged-eviction serve --model Qwen/Qwen3-8B --budget 2048 --policy keydiff

  paged-eviction serve --model embedded --budget 256 --port 8001 --cb-num-blocks 64
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("serve", epilog=EPILOG, context_settings=settings)(serve)


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="A folder or a name on the Hugging Face Hub; embedded is the small one of the package.")
    ],
    budget: Annotated[int, typer.Option(min=1, help="Tokens held per request and layer, a multiple of --block-size.")],
    policy: Annotated[
        str, typer.Option(help="What evicts: keys, values and positions may decide, queries may not.")
    ] = "paged_eviction",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens evicted together.")] = 16,
    sink_tokens: Annotated[
        int | None, typer.Option(min=0, show_default="a block", help="First tokens that are never evicted.")
    ] = None,
    protected_prefix: Annotated[
        int, typer.Option(min=0, help="The same for a system prompt; the larger of the two counts.")
    ] = 0,
    recent_tokens: Annotated[
        int | None, typer.Option(min=0, show_default="a block", help="Newest tokens that are never evicted.")
    ] = None,
    positions: Annotated[
        Literal["text", "cache"],
        typer.Option(help="Where held tokens stand; text only, cache is refused with the reason."),
    ] = "text",
    prefill_chunk_size: Annotated[int, typer.Option(min=1, help="Prompts are read in pieces of so many tokens.")] = 512,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most that a request may ask for.")] = 4096,
) -> None:
    """An OpenAI-compatible server whose requests hold at most so many tokens: transformers serve with eviction on.

    Every option that is not listed here goes to transformers serve, whose --help lists them: --port, --host, --dtype,
    --device, --attn-implementation, --cb-num-blocks, ... It listens on localhost unless --host says otherwise, and has
    no password: put a proxy in front before you open it. /metrics tells of live requests, tokens and pages.
    """
    with plain_errors():
        from ..serving.server import serve as run

        run(
            model,
            context.args,
            max_new_tokens,
            budget=budget,
            policy=policy,
            block_size=block_size,
            sink_tokens=sink_tokens,
            protected_prefix=protected_prefix,
            recent_tokens=recent_tokens,
            positions=positions,
            prefill_chunk_size=prefill_chunk_size,
        )

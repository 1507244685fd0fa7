"""`paged-eviction serve`."""

from __future__ import annotations

from ..options.serve import ServeOptions

EPILOG = """[bold]Examples[/]

  paged-eviction serve --model Qwen/Qwen3-8B --budget 2048 --policy keydiff

  paged-eviction serve --model embedded --budget 256 --port 8001 --cb-num-blocks 64
"""


def serve(options: ServeOptions, others: list[str]) -> None:
    """An OpenAI-compatible server whose requests hold at most so many tokens: transformers serve with eviction on.

    Every option that is not listed here goes to transformers serve, whose --help lists them: --port, --host, --dtype,
    --device, --attn-implementation, --cb-num-blocks, ... It listens on localhost unless --host says otherwise, and has
    no password: put a proxy in front before you open it. /metrics tells of live requests, tokens and pages.
    """
    from ..serving.server import serve as run

    run(options.model, others, options.max_new_tokens, **options.batching_arguments)

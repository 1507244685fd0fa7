"""`paged-eviction serve`."""

from __future__ import annotations

from .options import ServeOptions

EPILOG = """[bold]Examples[/]

  paged-eviction serve --model Qwen/Qwen3-8B --budget 2048 --policy keydiff

  paged-eviction serve --model Qwen/Qwen3-8B --budget 2048 --protect system,last_user

  paged-eviction serve --model embedded --budget 256 --port 8001 --pages 64
"""
#: What `--help` says.
BRIEF = {
    "model": "a folder, a GGUF file or a name on the Hub",
    "budget": "tokens that each request holds",
    "policy": "one of `paged-eviction policies`",
    "context": "texts that were read before, saved by `paged-eviction compress`",
    "protect": "messages that stay whole: system, last_user, tools, ...",
    "host": "where it listens (localhost)",
    "port": "where it listens (8000)",
    "api_key": "what clients have to show",
    "max_new_tokens": "most that a request may ask for (4096)",
    "max_queue": "answers that are worked on or waited for (256)",
    "pages": "pages that all requests share",
    "device": "cpu, cuda, cuda:1, ...",
    "dtype": "auto, float32, bfloat16 or float16",
}


def serve(options: ServeOptions) -> None:
    """A server that speaks OpenAI's protocol, whose requests hold at most so many tokens.

    It answers /v1/chat/completions and /v1/completions, streamed or not, and tells of itself at /v1/models, /metrics
    (Prometheus), /health and /openapi.json; there is nothing else. It listens on localhost unless --host says
    otherwise, and asks for no key without --api-key: put a proxy in front before you open it.
    """
    from .server import leave
    from .server import serve as run

    run(options)
    leave(0)  # taking a model apart takes seconds, and nobody waits for it

"""`paged-eviction serve`."""

from __future__ import annotations

from .options import ServeOptions

EPILOG = """[bold]Examples[/]

Requests of at most 2,048 tokens per layer, however long their prompts

  paged-eviction serve --model Qwen/Qwen3-8B --budget 2048 --policy keydiff

System messages are never evicted

  paged-eviction serve --model Qwen/Qwen3-8B --budget 2048 --protect system,last_user

The small model of this package, to try it

  paged-eviction serve --model embedded --budget 256 --port 8001 --pages 64
"""
#: The text of `--help`.
BRIEF = {
    "model": "a folder, a GGUF file or a name on the Hub",
    "budget": "tokens that each request holds",
    "policy": "which tokens to keep, from `paged-eviction policies`",
    "context": "texts that `paged-eviction compress` saved; requests continue from them",
    "protect": "messages that are never evicted: system, last_user, tools, ...",
    "host": "address to listen on (localhost)",
    "port": "port to listen on (8000)",
    "api_key": "key that clients must send",
    "allow_origin": "origin of web pages that may use the server (CORS)",
    "max_new_tokens": "most tokens of an answer (4096)",
    "max_queue": "most running or waiting answers (256)",
    "pages": "memory of all requests, in pages",
    "device": "cpu, cuda, cuda:1, ...",
    "dtype": "auto, float32, bfloat16 or float16",
}


def serve(options: ServeOptions) -> None:
    """Serve a model over HTTP, in OpenAI's protocol; each request holds at most --budget tokens.

    Routes: /v1/chat/completions and /v1/completions, streamed or not, /v1/models, /metrics (Prometheus), /health and
    /openapi.json. The server listens on localhost unless you give --host, and needs no key unless you give --api-key:
    put a proxy in front before you make it public.
    """
    from .server import leave
    from .server import serve as run

    leave(run(options))  # taking a model apart takes seconds, and nobody waits for it

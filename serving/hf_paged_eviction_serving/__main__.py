"""`python -m hf_paged_eviction_serving MODEL --budget 1024 [options of transformers serve]`."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from hf_paged_eviction.internals import read_bits, typed_options

#: Options of a cache that are options of this command.
_OF_CACHES = ("policy", "allocator", "heads", "bits", "block_size", "sink_tokens", "recent_tokens", "profile")
#: Options of `transformers serve` that have one right value here, or none that works.
_DECIDED = frozenset(
    "self force_model continuous_batching attn_implementation compile decision_config model_timeout "
    "cb_use_cuda_graph non_blocking".split()
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_paged_eviction_serving",
        usage="%(prog)s MODEL --budget N [options] [options of transformers serve]",
        description="transformers' own server; each request holds at most N tokens per layer. It listens on localhost.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--budget", type=int, required=True, metavar="N", help="tokens that a request holds per layer")
    for name, (_, typed) in typed_options(*_OF_CACHES).items():
        kind: Any = read_bits if name == "bits" else typed.kind if typed.kind in (int, str) else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=typed.metavar, help=typed.help)
    parser.add_argument("--prefill-chunk-size", type=int, default=512, metavar="N", help="a cut after each N tokens")
    parser.add_argument("--prefix-cache", default="256MiB", metavar="BYTES", help="for beginnings of prompts")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Start the server; it ends with SIGTERM or Ctrl-C."""
    words = sys.argv[1:] if words is None else list(words)
    parser = _parser()
    wants_help = not words or "--help" in words
    if wants_help:
        parser.print_help()
    elif words[0].startswith("-"):
        parser.error("MODEL comes first: a folder or a name on the Hub")
    try:
        import typer
        from transformers.cli.serve import Serve

        from .server import serve
    except ImportError as error:
        sys.exit(f"{error}. The server needs pip install 'hf_paged_eviction_serving[server]'.")
    model, options, rest = "", {}, ["--help"]
    if not wants_help:
        own, rest = parser.parse_known_args(words[1:])
        model, options = words[0], {name: value for name, value in vars(own).items() if value is not None}

    def run(**settings: Any) -> None:
        try:
            with serve(model, options, **settings):
                pass
        except (TypeError, ValueError) as error:
            sys.exit(f"Error: {error}")

    taken = inspect.signature(Serve.__init__).parameters
    kept = [part.replace(kind=part.KEYWORD_ONLY) for name, part in taken.items() if name not in _DECIDED]
    run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    run.__annotations__ = {part.name: part.annotation for part in kept}
    command = typer.Typer(add_completion=False)
    command.command(help="Options of transformers serve:" if wants_help else None)(run)
    command(rest, prog_name="python -m hf_paged_eviction_serving MODEL --budget N")


if __name__ == "__main__":
    main()

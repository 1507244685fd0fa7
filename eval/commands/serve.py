"""`paged-eviction serve`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..options.base import option
from ..options.cache import OneCacheOptions


class ServeOptions(OneCacheOptions):
    """What was typed; what transformers serve takes besides goes there as it is."""

    panel: ClassVar[str] = "The server"
    #: Pages of continuous batching hold tokens as they came, and one decision for all KV heads.
    left_out: ClassVar[frozenset[str]] = frozenset({"heads", "bits", "disposal"})

    model: str = option(
        ..., "A folder or a name on the Hugging Face Hub; embedded is the small one of the package.", metavar="NAME"
    )
    budget: int = option(..., "Tokens held per request and layer, a multiple of the block size.", at_least=1)
    policy: str = option(
        "paged_eviction", "What evicts: keys, values and positions may decide, queries may not.", metavar="NAME"
    )
    positions: Literal["text", "cache"] = option(
        "text", "Where held tokens stand; text only, cache is refused with the reason."
    )
    prefill_chunk_size: int = option(
        512, "Prompts are read in pieces of so many tokens.", at_least=1, panel=OneCacheOptions.panel
    )
    max_new_tokens: int = option(4096, "Most that a request may ask for.", at_least=1)

    @property
    def batching_arguments(self) -> dict[str, Any]:
        """Arguments of `paged_batching`."""
        return {name: getattr(self, name) for name in self.offered() if name not in ("model", "max_new_tokens")}


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

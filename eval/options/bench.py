"""The options of `paged-eviction bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from hf_paged_eviction.options.cache_options import read_size

from .base import option, words
from .cache import CacheOptions
from .model import Loading


def _listed(read: Callable[[str], Any], example: str) -> BeforeValidator:
    """The parts of a comma-separated list as `read` takes them, each once."""

    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not words(value):
            raise ValueError(f"write some, for example {example}")
        return tuple(dict.fromkeys(map(read, words(value))))

    return BeforeValidator(parse)


def _whole(word: str) -> int:
    if not (word.isascii() and word.isdigit() and int(word) > 0):
        raise ValueError("write whole numbers such as 1024,4096")
    return int(word)


def _held(word: str) -> int | str:
    if "%" in word:
        raise ValueError("write tokens, such as 1024, or bytes, such as 16MiB: there is no text to share")
    return read_size(word)


Sizes = Annotated[tuple[int, ...], _listed(_whole, "1024,4096")]


class StepOptions(Loading, CacheOptions):
    """What decides the numbers."""

    model: str = option(
        "100m",
        "A shape with random weights: 100m, smollm2-135m, llama-3.2-1b, llama-3.2-3b, llama-3.1-8b. Or embedded, a "
        "folder, a name on the Hugging Face Hub.",
    )
    contexts: Sizes = option((2048, 8192), "Tokens seen before the first step.", metavar="N,...")
    budgets: Annotated[tuple[int | str, ...], _listed(_held, "1024,16MiB")] = option(
        (1024,),
        "Tokens per layer and row, or bytes per row in all paged layers together (16MiB).",
        metavar="N,SIZE,...",
    )
    batch_sizes: Sizes = option((1,), "Rows.", metavar="N,...")
    variants: Annotated[tuple[str, ...], _listed(str, "floor,paged")] = option(
        (), "Which of those above.", metavar="A,...", shown="all"
    )
    policy: str = option("paged_eviction", "One that does not look at attention.", metavar="NAME")
    steps: int = option(32, "Decoded tokens per timing: whole blocks.", at_least=1)
    rounds: int = option(9, "Timings.", at_least=1)
    threads: int | None = option(None, "Threads of torch on a CPU.", at_least=1, shown="torch decides")


class BenchOptions(StepOptions):
    """What was typed."""

    first: ClassVar[tuple[str, ...]] = tuple("model contexts budgets batch_sizes variants policy device output".split())

    output: Path = option(Path("results/bench"), "Folder of results. The same command continues a stopped run.")

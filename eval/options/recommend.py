"""The options of `paged-eviction recommend`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from .base import File, Numbers, Options, Words, option, readable, words
from .cache import CacheOptions, precision
from .evaluate import POSITIONS, TaskFileOptions
from .model import ModelOptions

POLICIES = "paged_eviction,keydiff,lagkv,recency,snapkv,h2o,tova,attention_mean,expected_attention,r_kv"
TRIED, SEARCH = "What is tried", "The search"


def precisions(text: str) -> tuple[str | None, ...]:
    """What `--bits` of a cache is given for each part of "none,8,8/4"; None is the model's own.

    Raises:
        ValueError: a part is no precision.
    """
    found: list[str | None] = []
    for word in words(text):
        pair = None if word.lower() == "none" else word.replace("/", ",")
        try:
            precision(pair)
        except ValueError:
            raise ValueError("write none, 8, 4, 3 or 2, for keys and values apart 8/4, with commas between") from None
        found.append(pair)
    if not found:
        raise ValueError("write at least one, such as none,8")
    return tuple(found)


def _checked_positions(text: str) -> str:
    found = words(text)
    if not found or not set(found) <= set(POSITIONS):
        raise ValueError("write text, cache, or both with a comma")
    return ",".join(found)


class GridOptions(Options):
    """The choices whose every combination is a candidate."""

    panel: ClassVar[str] = TRIED

    policies: Words = option(
        POLICIES,
        "Names from `paged-eviction policies`, with parameters and modifiers.",
        metavar="A,B,...",
        shown=POLICIES.replace(",", ", "),  # one long word would be cut on 80 columns
    )
    allocators: Words = option(
        "uniform,pyramid",
        "How the budget is shared out among layers and heads. Those that decide row by row, such as ada_kv, keep to "
        "tokens, not to bytes: try them with a --budget in tokens.",
        metavar="A,B,...",
    )
    bits: Annotated[Numbers, readable(precisions)] = option(
        "none,8,4",
        "Bits of a number that is kept: none, 8, 4, 3, 2, or keys/values such as 8/4.",
        metavar="N,...",
        panel=TRIED,
    )
    positions: Annotated[Words, AfterValidator(_checked_positions)] = option(
        "text,cache",
        "Where held tokens stand: at their place in the text, or one after the other.",
        metavar="A,B",
        panel=TRIED,
    )
    disposals: Words = option("drop,recall", "What becomes of evicted tokens.", metavar="A,B,...")


class ReadingOptions(Options):
    """What is read, and how: decides the numbers of a row."""

    panel: ClassVar[str] = "What is read"

    length: int | None = option(
        None,
        "Tokens per passage, its end included. Longer texts become several passages.",
        at_least=32,
        shown="four times what --budget holds, at most the model's window",
    )
    answer_tokens: int = option(
        64, "Tokens at the end of a text's passage that come one by one, as an answer does.", at_least=2
    )
    reading_tokens: int = option(
        256, "Places before them where distributions are compared, spread evenly: bounds the memory.", at_least=1
    )
    prefill_chunk_size: int = option(512, "Tokens per forward while a prompt is read.", at_least=1)
    question_aware: bool = option(
        True,
        "With --task-file: the question is read as the end of the prompt, or on its own after the context was "
        "compressed.",
        flags="--question-aware/--question-agnostic",
        panel="A task of your own",
    )


class RecommendOptions(ModelOptions, GridOptions, ReadingOptions, TaskFileOptions, CacheOptions):
    """What was typed."""

    panel: ClassVar[str] = SEARCH
    left_out: ClassVar[frozenset[str]] = frozenset({"disposal", "metric", "answers"})

    text: list[File] | None = option(
        None,
        "Texts of yours: plain texts, or JSON lines with a field context or text. Without --text and --task-file: "
        "standard-library modules that the embedded model never saw.",
        metavar="FILE...",
        panel="What is read",
    )
    files: list[File] | None = option(None, "More of them.", metavar="[FILE...]", argument=True)
    task_file: File | None = option(
        None,
        "Instead of texts, prompts: records as `paged-eviction eval --task-file` takes them. Answers are not needed.",
        metavar="FILE",
        panel="What is read",
    )
    budgets: Numbers | None = option(
        None,
        "What one row may hold: bytes of keys and values (2GiB, 512MiB), tokens per layer (256) or a share of a "
        "passage (25%); of tokens, few bits take fewer bytes. Several with commas are searched one by one.",
        metavar="SIZE,N,P%",
        flags="--budget",
        panel=TRIED,
    )
    passages: int = option(40, "Most passages that are read; the more, the surer the choice.", at_least=1)
    share: float = option(
        0.1,
        "Most readings, as a share of those that every candidate on every passage would take. 1 reads them all.",
        at_least=0.001,
        at_most=1.0,
    )
    batch_size: int | None = option(
        None,
        "Passages of one length that are read together: faster where memory has room for so many full caches. Where it "
        "runs out, fewer.",
        at_least=1,
        shown="8 for the embedded model, else 1",
    )
    decide_by: Literal["both", "answering", "reading"] = option(
        "both",
        "Which divergence decides: of the tokens that come one by one (answering), of those before them (reading), or "
        "the mean of the two.",
        metavar="WHAT",
    )
    config: File | None = option(
        None, "Options from a file; every search writes such a file, run.yaml.", metavar="FILE.yaml"
    )
    output: File = option(
        Path("results/recommend"),
        "Folder of results. A search that was stopped is continued by the same command.",
    )

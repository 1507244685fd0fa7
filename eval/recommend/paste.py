"""The choice as code and as options of commands."""

from __future__ import annotations

import shlex

from ..options.recommend import RecommendOptions
from .candidates import DROP, Candidate
from .sizes import Entry


def code(entry: Entry, options: RecommendOptions, held: int) -> str:
    """Lines to paste into a program that has a `model` and `inputs`.

    Args:
        held: tokens per layer that were found to fit.
    """
    candidate = entry.candidate
    words = [_size(entry, held), *(f"{name}={value!r}" for name, value in candidate.arguments(options).items())]
    lines = ["from hf_paged_eviction import PagedEvictionCache", ""]
    if candidate.needs_queries:
        lines.append('model.set_attn_implementation("paged_eviction")')
    lines += [
        f"cache = PagedEvictionCache(model.config, {', '.join(words)})",
        f"model.generate(**inputs, past_key_values=cache, prefill_chunk_size={options.prefill_chunk_size})",
    ]
    return "\n".join(lines)


def command(entry: Entry, options: RecommendOptions, held: int) -> str:
    """A conversation with such a cache."""
    size = _size(entry, held).replace("memory=", "--memory ").replace("budget=", "--budget ").replace('"', "")
    return f"paged-eviction chat --model {shlex.quote(options.model)} {size} " + " ".join(
        map(shlex.quote, entry.candidate.flags(options))
    )


def _size(entry: Entry, held: int) -> str:
    """In bytes where the cache takes bytes: with a disposal they would not count what it keeps beside the tokens."""
    if entry.size.memory is None or not _by_bytes(entry.candidate):
        return f"budget={held}"
    return f'memory="{entry.size.label}"'


def _by_bytes(candidate: Candidate) -> bool:
    return candidate.disposal == DROP

"""The time to the first token, from `prefill/summary.json`."""

from __future__ import annotations

from typing import Any

from measured import load
from writing import table

from hf_paged_eviction_eval.bench.variants import FULL

_COMMAND = "python benchmarks/prefill.py --threads 1"
#: The longest prompt that is read in chunks of several sizes.
_COMPARED = 16384
#: Seconds that are nearer than this share are not told apart.
_SAME = 0.05


def prefill_time(_: str) -> str:
    """Seconds over lengths, chunk sizes and policies."""
    summary = load("prefill/summary")
    settings = summary["settings"]
    machine, versions = summary["environment"]["hardware"], summary["environment"]["versions"]
    seconds = {(row["context"], row["cache"], row["chunk"]): row["seconds"] for row in summary["rows"]}
    lengths = sorted({length for length, _, _ in seconds})
    longest = max(length for length in lengths if length <= _COMPARED)
    first, chunk = next((cache, size) for _, cache, size in seconds if cache != FULL)
    chunks = {size: seconds[longest, first, size] for size in sorted({size for *_, size in seconds if size})}
    best = min(size for size, took in chunks.items() if took <= (1 + _SAME) * min(chunks.values()))
    policies = [
        (policy, f"{seconds[longest, policy, chunk]:.3g}")
        for policy in dict.fromkeys(cache for _, cache, _ in seconds if cache != FULL)
    ]
    threads = "one thread" if machine["torch_threads"] == 1 else f"{machine['torch_threads']} threads"
    in_chunks = f"chunks of {chunk:,}"
    header = (
        *("tokens", "full, one forward", f"full, {in_chunks}", f"budget {settings['budgets'][0]:,}, {in_chunks}"),
        *("one forward / ours", "chunks / ours"),
    )
    lines = [_line(seconds, length, first, chunk) for length in lengths]
    sizes = [(f"{size:,}", f"{took:.3g}") for size, took in chunks.items()]
    return "\n\n".join(
        [
            "Seconds until the first token:",
            table(header, lines, numbers_from=1),
            f"(`{_COMMAND}`: a Llama of the shape `{settings['model']}` with random weights, policy "
            f"`{first}`; {machine['cpu']}, {threads}, torch {versions['torch']}, "
            f"transformers {versions['transformers']}.)",
            f"Chunk sizes at {longest:,} tokens:",
            table(("chunk", "seconds"), sizes, numbers_from=1),
            f"The smallest chunk that is within 5 % of the fastest is **{best:,}**: take it unless memory "
            "is so short that fewer tokens beside the budget matter.",
            f"Policies at {longest:,} tokens in chunks of {chunk:,}:",
            table(("policy", "seconds"), policies, numbers_from=1),
        ]
    )


def _line(seconds: dict[Any, float], length: int, policy: str, chunk: int) -> list[str]:
    """The full cache in one forward and in chunks, this one, and how many times faster it is than either."""
    ours, full = seconds[length, policy, chunk], (seconds[length, FULL, None], seconds[length, FULL, chunk])
    return [
        f"{length:,}",
        *(f"{seconds:.3g}" for seconds in (*full, ours)),
        *(f"{seconds / ours:.1f}" for seconds in full),
    ]

"""What `bench --preset prefill` found, over lengths, chunk sizes and policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...store.summaries.table import Table, simple_table

FULL = "full"
#: Up to this length chunk sizes and policies are compared; beyond, what grows with the square and one line of what does
#: not.
COMPARED = 16384
#: Seconds that are nearer than this share are not told apart.
SAME = 0.05


def over_length(found: Mapping[str, Any]) -> list[list[str]]:
    """Length; seconds of the full cache in one forward and in chunks, and of this one; how many times faster it is."""
    settings, lines = found["settings"], []
    for length in sorted({row["length"] for row in found["rows"]}):
        of = {(row["cache"], row["chunk"]): row["seconds"] for row in found["rows"] if row["length"] == length}
        ours = of[settings["policies"][0], settings["chunk"]]
        full = of[FULL, None], of[FULL, settings["chunk"]]
        lines.append(
            [f"{length:,}", *(f"{each:.3g}" for each in (*full, ours)), *(f"{each / ours:.1f}" for each in full)]
        )
    return lines


def over_chunks(found: Mapping[str, Any]) -> list[list[str]]:
    """Chunk size and seconds, at the longest prompt where sizes are compared."""
    of = _chunks(found)
    return [[f"{chunk:,}", f"{of[chunk]:.3g}"] for chunk in sorted(of)]


def over_policies(found: Mapping[str, Any]) -> list[list[str]]:
    """Policy and seconds, at the longest prompt where policies are compared."""
    settings = found["settings"]
    rows = [row for row in found["rows"] if (row["length"], row["chunk"]) == (compared(found), settings["chunk"])]
    of = {row["cache"]: row["seconds"] for row in rows}
    return [[policy, f"{of[policy]:.3g}"] for policy in settings["policies"] if policy in of]


def compared(found: Mapping[str, Any]) -> int:
    """The longest prompt where chunk sizes and policies were compared; 0 if there is none."""
    return max((row["length"] for row in found["rows"] if row["length"] <= COMPARED), default=0)


def best_chunk(found: Mapping[str, Any]) -> int | None:
    """The smallest chunk that is about as fast as the fastest: it takes the least memory."""
    of = _chunks(found)
    return min((chunk for chunk, seconds in of.items() if seconds <= (1 + SAME) * min(of.values())), default=None)


def _chunks(found: Mapping[str, Any]) -> dict[int, float]:
    policy, longest = found["settings"]["policies"][0], compared(found)
    return {row["chunk"]: row["seconds"] for row in found["rows"] if (row["length"], row["cache"]) == (longest, policy)}


def heads(found: Mapping[str, Any]) -> Sequence[str]:
    """Of the columns of `over_length`."""
    settings = found["settings"]
    chunks = f"chunks of {settings['chunk']:,}"
    ours = f"budget {settings['budget']:,}, {chunks}"
    return "tokens", "full, one forward", f"full, {chunks}", ours, "one forward / ours", "chunks / ours"


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """For a terminal."""
    settings, longest = found["settings"], compared(found)
    yield simple_table("seconds to the first token", heads(found), over_length(found))
    if longest:
        best = f"smallest within {SAME:.0%} of the fastest: {best_chunk(found)}"
        title = f"{longest:,} tokens, {settings['policies'][0]}; {best}"
        yield simple_table(title, ("chunk", "s"), over_chunks(found))
        title = f"{longest:,} tokens, chunks of {settings['chunk']}"
        yield simple_table(title, ("policy", "s"), over_policies(found))

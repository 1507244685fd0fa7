"""What episodes and query memories are worth, from `episodes.json` and `query_memory.json`."""

from __future__ import annotations

from typing import Any

import measured
from myst_text import table

_PLUS_MINUS = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"


def episodes(_: str) -> str:
    """Accuracy, bytes and time of ways to remember a conversation."""
    of = measured.load("episodes")
    tables = [_lengths(int(length), found) for length, found in of["lengths"].items()]
    return (
        "\n\n".join(tables)
        + f"\n\n({measured.experiment('episodes')}; {measured.machine('episodes')}; seconds of the processor, on a "
        "machine with other work.)"
    )


def _lengths(length: int, of: dict[str, Any]) -> str:
    found = of["found"]
    full = found["16/16 | full"]["in_use_bytes"]
    rows = []
    for name, row in found.items():
        part, _, method = name.partition(" | ")
        rows.append(
            (
                part,
                method,
                f"{row['score']:.0f}{_PLUS_MINUS}{row['noise']:.0f}",
                str(len(row["by_conversation"])),
                f"{100 * row['in_use_bytes'] / full:.0f} %",
                f"{100 * row['elsewhere_bytes'] / full:.0f} %",
                f"{row['read_seconds']:.2f}",
            )
        )
    head = f"Conversations of {length:,} tokens, four questions each; answers in %, and twice the standard error:\n\n"
    return head + table(
        ("budget", "", "answers", "conversations", "bytes in use", "elsewhere", "seconds to read"), rows
    )


def query_memory(_: str) -> str:
    """What waiting is worth to a decoder that was not trained for it, and to an encoder that was."""
    of = measured.load("query_memory")
    decoder, encoder = of["decoder"], of["encoder"]
    delays = list(decoder["perplexity"])
    rows = [(f"`{task}`", *(f"{scores[delay]:.0f}" for delay in delays)) for task, scores in decoder["scores"].items()]
    rows.append(("perplexity", *(f"{decoder['perplexity'][delay]:.1f}" for delay in delays)))
    names = list(encoder["filled_in"])
    trained = [
        (name, *(f"{first:.0f} / {second:.0f}" for first, second in asked.values()))
        for name, asked in encoder["filled_in"].items()
    ]
    return (
        "**Not trained for it.** The embedded model, trained causally, reads its prompts as if it were a prefix model; "
        f"answers in % ({decoder['count']} prompts of {decoder['length']} tokens for each task), and perplexity of the "
        f"second half of {decoder['texts']} texts of as many tokens, by how many later tokens a query waits for:\n\n"
        + table(("", *(f"{delay}" if int(delay) else "causal" for delay in delays)), rows)
        + "\n\n**Trained for it.** A BERT of two layers learns to fill in masked tokens of 32, of which the second "
        "half repeats the first; memories hold 20. Filled in right, in %, in the first half (where only what comes 16 "
        "tokens later tells) and in the second:\n\n"
        + table(("trained with", *(f"asked with {name}" for name in names)), trained)
        + f"\n\n({measured.experiment('query_memory')}; {measured.machine('query_memory')}.)"
    )

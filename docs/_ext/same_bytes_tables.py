"""What two tiers and a low rank are worth at the same device bytes, from `demote.json` and `rank.json`."""

from __future__ import annotations

from typing import Any

import measured
from myst_text import table


def demote(_: str) -> str:
    """Accuracy and step times of demoting."""
    return _page("demote")


def rank(_: str) -> str:
    """Accuracy and step times of a low rank, and what the directions hold."""
    found = measured.load("rank")
    rows = [
        (f"layer {index}", title, *(f"{100 * share:.1f}" for share in shares[name][:-1]))
        for index, shares in found["shares"].items()
        for name, title in (
            ("keys", "products of keys and queries"),
            ("rotated", "keys alone, after rotation"),
            ("plain", "keys alone, before rotation"),
            ("values", "values"),
        )
    ]
    names = [f"rank {at}" for at in found["shares_at"][:-1]]
    return (
        f"{_page('rank')}\n\nShare of the variance, in %, that the first directions hold (a head has "
        f"{found['shares_at'][-1]} channels):\n\n" + table(("", "variance of", *names), rows, numbers_from=2)
    )


def _page(name: str) -> str:
    found = measured.load(name)
    settings, results = found["settings"], found["results"]
    shares = sorted({row["share_of_bytes"] for row in results})
    policies = list(dict.fromkeys(row["policy"] for row in results))
    ways = list(dict.fromkeys(row["way"] for row in results))
    header = ["", "tokens", *(f"`{policy}`, {100 * share:g} %" for share in shares for policy in policies)]
    rows = [[f"`{way}`", _tokens(results, way), *_cells(results, way, shares, policies)] for way in ways]
    steps = found["step_ms"]
    timed = [way for way in ways if all(way in of for of in steps.values())]
    times = [(f"`{way}`", *(f"{of[way]:.1f}" for of in steps.values())) for way in timed]
    return (
        "Accuracy on the embedded model, and in parentheses its standard error over prompts, at a share of the device "
        f"bytes of the full cache in 16 bits: seven tasks of {settings['samples']} prompts of {settings['length']:,} "
        f"tokens, the question after compression, blocks of {settings['block_size']}. Host bytes are 0 everywhere. "
        "*tokens* are those that fit, by share; of two tiers those in slots and those demoted.\n\n"
        + table(header, rows, numbers_from=2)
        + "\n\nMilliseconds of CPU time of a decode step behind so many tokens, at an eighth of the full cache's bytes "
        "(embedded model, one thread, float32; variants in turn, medians):\n\n"
        + table(("", *(f"{int(length):,}" for length in steps)), times, numbers_from=1)
        + f"\n\n({measured.experiment(name)}, `benchmarks/results/{name}.json`; {measured.machine(name)}.)"
    )


def _tokens(results: list[dict[str, Any]], way: str) -> str:
    counts = {row["share_of_bytes"]: (row["tokens"], row["demoted"]) for row in results if row["way"] == way}
    return ", ".join(f"{held} + {demoted}" if demoted else str(held) for _, (held, demoted) in sorted(counts.items()))


def _cells(results: list[dict[str, Any]], way: str, shares: list[float], policies: list[str]) -> list[str]:
    found = {(row["share_of_bytes"], row["policy"]): row for row in results if row["way"] == way}
    rows = [found.get((share, policy)) for share in shares for policy in policies]
    return ["-" if row is None else f"{row['accuracy']:.3f} ({row['error']:.3f})" for row in rows]

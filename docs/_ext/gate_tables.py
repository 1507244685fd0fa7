"""What gates are worth, from `gates.json`."""

from __future__ import annotations

from typing import Any

import measured
from myst_text import table


def gates(_: str) -> str:
    """Accuracy and perplexity next to the calibrated scores."""
    of = measured.load("gates")
    settings = of["settings"]
    rows = [
        (
            *(row["question"], row["budget"], f"`{row['policy']}`", _percent(row, "score", "error"), _gain(row)),
            *(f"{100 * row['tasks'][task]:.0f}" for task in settings["tasks"]),
        )
        for row in of["tasks"]
    ]
    texts = [
        (str(row["budget"]), f"`{row['policy']}`", f"{row['perplexity']:.2f}", _ratio(row)) for row in of["perplexity"]
    ]
    seeds = " and ".join(map(str, settings["seeds"]))
    head = ("question", "budget", "policy", "mean", "over calibrated", *settings["tasks"])
    return (
        f"## What they are worth\n\nOn the embedded model, {settings['samples']} prompts of "
        f"{settings['length']} tokens per task and seed, seeds {seeds}, by which nothing was chosen; scores in %, "
        f"with standard errors over prompts, differences of the same prompts:\n\n"
        f"{table(head, rows, numbers_from=3)}\n\n"
        f"Perplexity of {settings['texts']} texts of 1536 tokens, read in chunks of 64, after the first eviction:\n\n"
        f"{table(('budget', 'policy', 'perplexity', 'to calibrated'), texts, numbers_from=2)}\n\n"
        f"(`python benchmarks/gates.py`; {measured.machine('gates')}.)"
    )


def _percent(row: dict[str, Any], name: str, error: str) -> str:
    return f"{100 * row[name]:.1f} ± {100 * row[error]:.1f}"


def _gain(row: dict[str, Any]) -> str:
    if row["policy"].startswith("calibrated"):
        return ""
    return f"{100 * row['over_calibrated']:+.1f} ± {100 * row['over_calibrated_error']:.1f}"


def _ratio(row: dict[str, Any]) -> str:
    if row["policy"].startswith("calibrated"):
        return ""
    return f"{row['ratio_to_calibrated']:.3f} ± {row['ratio_error_to_calibrated']:.3f}"

"""What gates are worth, from `gates.json`."""

from __future__ import annotations

from typing import Any

import measured
from myst_text import table

_MODELS = {"embedded": "The embedded model", "second": "A second model"}


def gates(_: str) -> str:
    """Accuracy and perplexity next to the calibrated scores, model by model."""
    found = measured.load("gates")
    return "## What they are worth\n\n" + "\n\n".join(
        _of_model(name, of, "### " + _MODELS.get(name, name)) for name, of in found.items()
    )


def _of_model(name: str, of: dict[str, Any], heading: str) -> str:
    settings = of["settings"]
    rows = [
        (
            *(row["question"], row["budget"], f"`{row['policy']}`", _percent(row, "score", "error"), _gain(row)),
            *(f"{100 * row['tasks'][task]:.0f}" for task in settings["tasks"]),
        )
        for row in of["tasks"]
    ]
    head = ("question", "budget", "policy", "mean", "over calibrated", *settings["tasks"])
    seeds = " and ".join(map(str, settings["seeds"]))
    parts = [
        heading,
        f"{settings['samples']} prompts of {settings['length']} tokens per task and seed, seeds {seeds}, by which "
        f"nothing was chosen, blocks of {settings['block_size']}; scores in %, with standard errors over prompts, "
        "differences of the same prompts:",
        table(head, rows, numbers_from=3),
    ]
    if of["perplexity"]:
        texts = [
            (str(row["budget"]), f"`{row['policy']}`", f"{row['perplexity']:.2f}", _ratio(row))
            for row in of["perplexity"]
        ]
        parts += [
            f"Perplexity of {settings['texts']} texts of 1536 tokens, read in chunks of 64, after the first eviction:",
            table(("budget", "policy", "perplexity", "to calibrated"), texts, numbers_from=2),
        ]
    return "\n\n".join([*parts, f"({measured.experiment('gates')}; {measured.where(of['environment'])}.)"])


def ceiling(_: str) -> str:
    """What a score could find that does not know the question, from `gates_ceiling.json`."""
    found = measured.load("gates_ceiling")
    settings = found["settings"]
    rows = [
        (
            *(row["question"], _KEEPS.get(row["keeps"], f"`{row['keeps']}`"), f"{100 * row['score']:.1f}", _over(row)),
            *(f"{100 * row['tasks'][task]:.0f}" for task in settings["tasks"]),
        )
        for row in found["rows"]
    ]
    return (
        table(("question", "kept by", "mean", "over calibrated", *settings["tasks"]), rows, numbers_from=2)
        + f"\n\n({measured.experiment('gates_ceiling')}; {settings['budget']} of {settings['length']} tokens, "
        f"{settings['samples']} prompts per task and seed; {measured.machine('gates_ceiling')}.)"
    )


_KEEPS = {
    "every question": "what it gets from any question",
    "this question": "what it gets from the question that is asked",
}


def _over(row: dict[str, Any]) -> str:
    if row["keeps"].startswith("calibrated"):
        return ""
    return f"{100 * row['over_calibrated']:+.1f} ± {100 * row['over_calibrated_error']:.1f}"


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

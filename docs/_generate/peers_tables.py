"""kvpress and this package on the same prompts, from `peers_table.json`."""

from __future__ import annotations

from measured import experiment, load, machine
from writing import table

_PLACES = {"agnostic": "after compression", "aware": "in the prompt"}
_SIDES = {"kvpress": "kvpress", "tokens": "here, same tokens", "bytes": "here, same bytes in 4 bits"}


def peers(_: str) -> str:
    """Scores, sizes and step times, a table for each place of the question and budget."""
    results = load("peers_table")
    header = ("policy", "side", "score", "tokens held", "bytes held", "step / kvpress")
    parts = []
    for run, policies in results["scores"].items():
        mode, budget = run.split()
        rows = [
            (
                f"`{policy}`" if side == "kvpress" else "",
                _SIDES[side],
                "{:.2f} ± {:.2f}".format(*cell["score"]),
                f"{cell['tokens']:.0f}",
                f"{cell['bytes']:,}",
                f"{cell['step / kvpress']:.2f}",
            )
            for policy, sides in policies.items()
            for side, cell in sides.items()
        ]
        parts.append(f"The question comes {_PLACES[mode]}, budget {budget}:\n\n" + table(header, rows, numbers_from=2))
    settings = (
        f"({experiment('peers_table')}: {results['samples']} prompts of {results['length']:,} tokens per task, "
        f"mean of {len(results['tasks'])} tasks and its standard error, bfloat16; kvpress {results['kvpress']}, "
        f"{machine('peers_table')}.)"
    )
    return "\n\n".join([*parts, settings])

"""The leaderboard of real models: every row that is kept, in one table per protocol.

    python benchmarks/leaderboard.py     # benchmarks/results/real_models -> results/leaderboard.md

A protocol is all that decides a number but the policy and the budget: the model, every setting of the run, the digests
of prompts and records, the version of transformers. Rows of different files share a table if theirs are equal, and
never otherwise; files that are older than the protocol stay alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from real_rows import KEPT, finished, tables
from real_tables import board

PAGE = Path("results/leaderboard.md")
_HEAD = """# Leaderboard of real models

Every row of `benchmarks/results/real_models`, written by `make leaderboard`. **One table is one
protocol**: numbers of different tables are not to be compared, and all that a table shows is over the same questions.
Each table names the commands of its rows, `python benchmarks/real_models.py run ...`. `calibrated` and
`calibrated@global` are what `auto` was before it looked at queries. What the columns mean: `docs/real_models.md`.
"""


def page(folder: Path = KEPT) -> str:
    """The whole page."""
    parts = [_HEAD]
    for files, terms, every in tables(folder):
        if (every["policy"] == "full").all():
            continue
        protocol = ", ".join(f"{name} {_word(value)}" for name, value in (terms or {}).items())
        runs = ", ".join(
            f"`{' --name '.join(name.split('_', 1)[::-1])} --limit {limit}`" for name, limit in files.items()
        )
        parts += [
            f"## {next(iter(files)).replace('_', ' ')}\n",
            f"Protocol: {protocol}.\n" if terms else "Its protocol was not written down: these rows stay alone.\n",
            f"Run: {runs}.\n",
        ]
        rows, left_out = finished(every)
        parts.append(board(rows) + "\n")
        while left_out:
            rows, later = finished(every, left_out)
            names = ", ".join(f"`{policy}` at {budget}" for policy, budget in left_out if (policy, budget) not in later)
            parts += [f"Over other questions, for the sake of {names}:\n", board(rows) + "\n"]
            left_out = later
    return "\n".join(parts)


def _word(value: Any) -> str:
    """Digests by their beginning."""
    if isinstance(value, dict):
        return "/".join(str(part)[:8] for part in value.values())
    if isinstance(value, list):
        return ", ".join(map(_word, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), "utf-8")
    print(f"wrote {PAGE}")

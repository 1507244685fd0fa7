"""Write the table of `benchmarks/results/policies.json` into `docs/results.md`.

The page marks the place by `<!-- policies:begin -->` and `<!-- policies:end -->`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS, replace_section, table

from hf_paged_eviction_eval.caches.budgets import FULL

PAGE = Path("docs/results.md")
BLOCK, BUDGETS, BLOCKS = 16, ("6%", "12.5%", "25%", "50%"), (1, 8, 32)

#: Whether the question is known, block size -> a run.
Runs = dict[tuple[bool, int], dict[str, Any]]


def content(results: dict[str, Any]) -> str:
    """A line per policy, the best first: shares in percent, and below it what they are."""
    runs: Runs = {(run["question_aware"], run["block_size"]): run for run in results["runs"]}
    columns = [(aware, BLOCK, budget) for aware in (False, True) for budget in BUDGETS]
    columns += [(False, block, "12.5%") for block in BLOCKS if (False, block) in runs]
    policies = list(dict.fromkeys(name for run in runs.values() for lines in run["budgets"].values() for name in lines))
    lines = {name: [_share(runs, name, column) for column in columns] for name in policies if name != FULL}
    ranked = sorted(lines, key=lambda name: -_rank([share for share, _ in lines[name]]))
    header = ("policy", *(_title(*column) for column in columns))
    rows = [(f"`{name}`", *(_cell(share, error) for share, error in lines[name])) for name in ranked]
    counts = sorted({run["samples"] for run in runs.values()})
    prompts = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    scores = [_score(runs, name, columns[1]) for name in ("random", "oracle", FULL)]
    return (
        f"**Share of the way from random eviction (0) to the oracle (100)**, `{results['command']}`: the embedded "
        f"model, {len(results['tasks']) - 1} tasks, {prompts} prompts of "
        f"{results['length']} tokens each, blocks of {BLOCK} tokens. *unknown*: the question comes after "
        f"compression; *known*: it is part of what is compressed. Behind ± the standard error. Mean scores at "
        f"{_title(*columns[1])}: random {scores[0]:.2f}, oracle {scores[1]:.2f}, full cache {scores[2]:.2f}. The order "
        "is that of this model; a large one's keys and values can have norms that mean the opposite.\n\n"
        + table(header, rows)
    )


def _title(aware: bool, block: int, budget: str) -> str:
    return f"{'known' if aware else 'unknown'}, {budget}" + (f", b{block}" if block != BLOCK else "")


def _cell(share: float | None, error: float | None) -> str:
    if share is None:
        return ""
    return f"{100 * share:.0f}" + ("" if error is None else f" ± {100 * error:.0f}")


def _share(runs: Runs, policy: str, column: tuple[bool, int, str]) -> tuple[float | None, float | None]:
    aware, block, budget = column
    numbers = runs.get((aware, block), {"budgets": {}})["budgets"].get(budget, {}).get(policy)
    return (None, None) if numbers is None else (numbers[0], numbers[1])


def _score(runs: Runs, policy: str, column: tuple[bool, int, str]) -> float:
    aware, block, budget = column
    mean: float = runs[aware, block]["budgets"][FULL if policy == FULL else budget][policy][-2]
    return mean


def _rank(shares: list[float | None]) -> float:
    known = [max(share, -1.0) for share in shares if share is not None]
    return sum(known) / len(known) if known else -2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    options = parser.parse_args()
    results = json.loads((RESULTS / "policies.json").read_text("utf-8"))
    text = options.page.read_text("utf-8")
    options.page.write_text(replace_section(text, "policies", content(results)), "utf-8")


if __name__ == "__main__":
    main()

"""Every policy at every budget on the embedded model, from `policies.json`: a line per policy, the best first."""

from __future__ import annotations

from statistics import fmean

from measured import BLOCK, BUDGETS, load
from writing import table

from hf_paged_eviction_eval.caches.budgets import FULL

#: At one block size all budgets are shown, and other block sizes at one budget.
_BLOCKS, _BUDGET = (1, 8, 32), "12.5%"
#: Whether the question is known, block size and budget.
_Column = tuple[bool, int, str]


def policy_scores(_: str) -> str:
    """Mean scores in percent, and above them what they are."""
    results = load("policies")
    runs = {(run["question_aware"], run["block_size"]): run for run in results["runs"]}
    columns = [(known, BLOCK, budget) for known in (False, True) for budget in BUDGETS]
    columns += [(False, block, _BUDGET) for block in _BLOCKS if (False, block) in runs]

    def numbers(policy: str, column: _Column) -> list[float | None]:
        """Score and error of all tasks, from 0 to 1."""
        budgets = runs.get(column[:2], {"budgets": {}})["budgets"]
        pair: list[float | None] = budgets.get(column[2], {}).get(policy, [None, None])[-2:]
        return pair

    policies = dict.fromkeys(name for run in runs.values() for lines in run["budgets"].values() for name in lines)
    lines = {name: [numbers(name, column) for column in columns] for name in policies if name != FULL}
    ranked = sorted(lines, key=lambda name: -fmean([score for score, _ in lines[name] if score is not None] or [-1.0]))
    rows = [(f"`{name}`", *(_cell(*pair) for pair in lines[name])) for name in ranked]
    counts = sorted({run["samples"] for run in runs.values()})
    prompts = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    full = [_cell(*numbers(FULL, (known, BLOCK, FULL))) for known in (False, True) if (known, BLOCK) in runs]
    return (
        f"**Mean score in %**, full cache {' and '.join(full)}, `{results['command']}`: the embedded "
        f"model, {len(results['tasks']) - 1} tasks, {prompts} prompts of "
        f"{results['length']} tokens each, blocks of {BLOCK} tokens. *unknown*: the question comes after "
        f"compression; *known*: it is part of what is compressed. Behind ± the standard error. The order "
        "is that of this model; a large one's keys and values can have norms that mean the opposite.\n\n"
        + table(("policy", *map(_title, columns)), rows)
    )


def _title(column: _Column) -> str:
    known, block, budget = column
    return f"{'known' if known else 'unknown'}, {budget}" + (f", b{block}" if block != BLOCK else "")


def _cell(score: float | None, error: float | None) -> str:
    if score is None:
        return ""
    return f"{100 * score:.0f}" + ("" if error is None else f" ± {100 * error:.0f}")

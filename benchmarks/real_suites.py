"""Whole suites at a glance: one line per policy, one column per suite; and how answers of a cache's own go on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

from real_compared import SHARES
from real_tables import (
    QUARTER,
    able,
    answered,
    apart,
    by_variant,
    cell,
    course_table,
    divergence,
    finished,
    late,
    load,
    percent,
    piped,
    question,
)

#: Tokens of RULER's prompts.
LENGTHS = (1024, 2048, 4096, 8000)
#: By table: what its column is called. Their rows stand in tables of their own on the leaderboard, since the settings
#: of some are those of the needles.
SUITES = {
    "long": "long answers",
    "longbench": "LongBench, own answers",
    "longbench_forced": "LongBench",
    "longeval": "LongEval",
    "turns": "turns",
    **{
        f"ruler{length}_{question}": f"RULER {round(length / 1024)}k, {question}"
        for length in LENGTHS
        for question in ("unknown", "known")
    },
}


def course(name: str, table: str) -> str:
    """Score, length, end and repetition of answers, and what a modifier around a policy takes of its repetition."""
    rows, _ = finished(load(name, table))
    if not rows:
        return "No rows."
    found, less = by_variant(rows), []
    for (policy, budget), group in found.items():
        inner = policy.removesuffix(")").partition("(")[2]
        if (inner, budget) in found:
            plain = {question(row): row["repeated"] for row in found[inner, budget]}
            taken = cell([100 * (plain[question(row)] - row["repeated"]) for row in group], 0)
            less.append(f"`{policy}` than `{inner}` at {budget}: {taken}")
    told = f"\n\nLess repeated, %: {'; '.join(less)}." if less else ""
    return f"n = {len({question(row) for row in rows})}:\n\n{course_table(rows)}{told}"


def everything(name: str) -> str:
    """Divergence of every policy and allocator, question unknown and known, at every share; and what is right."""
    sides: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    counts: list[str] = []
    for side in ("unknown", "known"):
        rows, _ = finished(load(name, f"every_{side}"))
        if rows:
            same = answered(rows)
            sides[side] = by_variant(same)
            counts.append(f"{side} {sum(row['policy'] == 'full' for row in same)}")
    if not sides:
        return "No rows."
    columns = [(side, budget) for side in sides for budget in sorted({budget for _, budget in sides[side]}, key=int)]
    policies = {policy for found in sides.values() for policy, _ in found}
    shared = [(side, budget) for side, budget in columns if all((policy, budget) in sides[side] for policy in policies)]
    order = {
        policy: divergence(row for side, budget in shared for row in sides[side][policy, budget]) for policy in policies
    }
    parts = [f"n: {', '.join(counts)}."]
    for title, shown in (("KL divergence, nats per token", apart), ("Right, %", percent)):
        lines = [("policy", *(f"{side}, {SHARES[budget]}" for side, budget in columns))]
        lines.append(("---", *["---:"] * len(columns)))
        for policy in sorted(policies, key=lambda policy: (order[policy], policy)):
            groups = (sides[side].get((policy, budget)) for side, budget in columns)
            lines.append((f"`{policy}`", *(shown(group) if group else "" for group in groups)))
        table = piped(lines)
        parts.append(f"<details><summary>{title}</summary>\n\n{table}\n\n</details>")
    return "\n\n".join(parts)


def heads_apart(name: str) -> str:
    """What it changes that each KV head evicts its own tokens: divergence in needles and texts, paired by question."""
    columns: list[dict[str, tuple[str, str, str]]] = []
    headers = []
    for title, tables, own, size in (
        ("unknown", ("needles_unknown", "every_unknown"), "heads_unknown", QUARTER),
        ("known", ("needles_known", "every_known"), "heads_known", QUARTER),
        ("text", ("text",), "heads_text", "25%"),
    ):
        measure = (lambda row: late(row, "kl")) if title == "text" else (lambda row: row["agreement"]["kl"])
        together = {
            (row["policy"], question(row)): row
            for table in tables
            for row in (load(name, table) if title == "text" else answered(load(name, table)))
            if row["budget"] == size
        }
        pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in load(name, own):
            if row["budget"] == size and (other := together.get((row["policy"], question(row)))):
                pairs[row["policy"]].append((measure(other), measure(row)))
        most = max(map(len, pairs.values()), default=0)
        columns.append({policy: _pair(found, most) for policy, found in pairs.items()})
        headers += [f"{title}: together", "apart", f"more (n = {most})"]
    lines = [("policy", *headers), ("---", *["---:"] * len(headers))]
    for policy in sorted({policy for column in columns for policy in column}):
        cells = [cell for column in columns for cell in column.get(policy, ("", "", ""))]
        lines.append((f"`{policy}`", *cells))
    return piped(lines)


def _pair(found: list[tuple[float, float]], most: int) -> tuple[str, str, str]:
    """Both means, and the mean of the differences with its error; how many there are, if not `most`."""
    one, other = (f"{fmean(values):.2f}" for values in zip(*found, strict=True))
    count = f" (n = {len(found)})" if len(found) < most else ""
    return one, other, cell([after - before for before, after in found], 2) + count


def overview(name: str, share: str = "25%") -> str:
    """Divergence over all prompts of a suite, and scores in tasks that the model does, at one share of the prompt.

    Over the questions that the default has answered; policies that stand in a quarter of the suites or more.
    """
    suites: dict[str, dict[str, list[dict[str, Any]]]] = {}
    right: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for table, title in SUITES.items():
        rows = load(name, table)
        if not any(row["policy"] == "auto" for row in rows) or "new_tokens" in rows[0]:
            continue
        rows, _ = finished(rows, {("auto", share)})
        found = {policy: group for (policy, size), group in by_variant(rows).items() if size == share}
        suites[title] = found
        if good := able(rows):
            groups = {"full": [row for row in rows if row["policy"] == "full"], **found}
            right[title] = {policy: [row for row in group if row["task"] in good] for policy, group in groups.items()}
    if not suites:
        return "No rows."
    counts = Counter(policy for found in suites.values() for policy in found)
    shown = [policy for policy, count in counts.items() if 4 * count >= len(suites)]
    order = sorted(
        shown, key=lambda policy: fmean(divergence(found[policy]) for found in suites.values() if policy in found)
    )
    far, scores = _grid(suites, order, apart), _grid(right, ["full", *order], _score)
    return (
        f"KL divergence from the full cache, nats per token:\n\n{far}\n\n"
        f"Right, %, in the tasks that the full cache does in 60 % of the cases:\n\n{scores}"
    )


def _grid(suites: dict[str, dict[str, list[dict[str, Any]]]], policies: list[str], shown: Callable[[Any], str]) -> str:
    """Suites down, with their prompts; policies across."""
    lines = [("suite", "n", *(f"`{policy}`" for policy in policies)), ("---", *["---:"] * (1 + len(policies)))]
    for title, found in suites.items():
        cells = (shown(found[policy]) if policy in found else "" for policy in policies)
        lines.append((title, str(len(found["auto"])), *cells))
    return piped(lines)


def _score(group: list[dict[str, Any]]) -> str:
    if all(row["score"] in (0, 1) for row in group):
        return percent(group)
    return cell([100 * row["score"] for row in group], 0)

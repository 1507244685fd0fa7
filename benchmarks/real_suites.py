"""Whole suites at a glance: one line per policy, one column per suite; and how answers of a cache's own go on."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from real_tables import able, by_variant, cell, course_table, finished, load, percent, question

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
        for length in (1024, 2048, 4096, 8000)
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


def overview(name: str, share: str = "25%") -> str:
    """Divergence over all prompts of a suite, and scores in tasks that the model does, at one share of the prompt."""
    columns: list[tuple[str, dict[str, str]]] = []
    apart: list[dict[str, float]] = []
    for table, title in SUITES.items():
        rows, _ = finished(load(name, table))
        if not rows or "new_tokens" in rows[0]:
            continue
        found = {policy: group for (policy, size), group in by_variant(rows).items() if size == share}
        if "auto" not in found:
            continue  # rows that are older than the default
        apart.append({policy: fmean(row["agreement"]["kl"] for row in group) for policy, group in found.items()})
        full = [row for row in rows if row["policy"] == "full"]
        cells = {policy: cell([row["agreement"]["kl"] for row in group], 2) for policy, group in found.items()}
        columns.append((f"{title}: KL (n = {len(full)})", cells))
        if good := able(rows):
            groups = {policy: [row for row in group if row["task"] in good] for policy, group in found.items()}
            groups["full"] = [row for row in full if row["task"] in good]
            cells = {policy: _score(group) for policy, group in groups.items()}
            columns.append((f"right, % ({len(groups['full'])})", cells))
    if not columns:
        return "No rows."
    everywhere = [policy for policy in apart[0] if all(policy in found for found in apart)]
    ranked = sorted(everywhere, key=lambda policy: fmean(found[policy] for found in apart))
    lines = [("policy", *(header for header, _ in columns)), ("---", *["---:"] * len(columns))]
    for policy in ("full", *ranked, *sorted({policy for found in apart for policy in found} - set(ranked))):
        lines.append((f"`{policy}`", *(column.get(policy, "") for _, column in columns)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _score(group: list[dict[str, Any]]) -> str:
    if all(row["score"] in (0, 1) for row in group):
        return percent(group)
    return cell([100 * row["score"] for row in group], 0)

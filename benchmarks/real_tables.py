"""The tables of real models, made of the rows that are kept: of texts, of answers, of needles, and the README's own."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from common import RESULTS

KEPT = RESULTS / "real_models"
#: Tokens of a needle's prompt of about 890 that are an eighth and a quarter.
EIGHTH, QUARTER = "112", "224"

#: Below this mean score of the full cache a task says nothing of caches.
ABLE = 0.6


def read_kept(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts and rows of a file of kept rows."""
    facts, *rows = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
    return facts, rows


def load(name: str, table: str) -> list[dict[str, Any]]:
    """The rows of a model's table; none if it was not run."""
    path = KEPT / f"{name}_{table}.jsonl.gz"
    return read_kept(path)[1] if path.exists() else []


def cell(values: Sequence[float], digits: int) -> str:
    """Mean and its standard error."""
    error = f" ± {stdev(values) / sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error}"


def apart(group: Iterable[dict[str, Any]], digits: int = 2) -> str:
    """Mean divergence of answers from the full cache's, and its standard error."""
    return cell([row["agreement"]["kl"] for row in group], digits)


def divergence(group: Iterable[dict[str, Any]]) -> float:
    """Mean of answers, nats per token."""
    return fmean(row["agreement"]["kl"] for row in group)


def piped(lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the header, the line below it, and rows."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grid(cells: dict[tuple[str, str], str], ranked: dict[str, float]) -> str:
    """Policies down, the best first; budgets across."""
    budgets = list(dict.fromkeys(budget for _, budget in cells))
    lines = [("policy", *budgets), ("---", *("---:" for _ in budgets))]
    for policy in sorted(ranked, key=ranked.__getitem__):
        lines.append((f"`{policy}`", *(cells.get((policy, budget), "") for budget in budgets)))
    return piped(lines)


def by_variant(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rows of each policy and budget, those of the full cache left out."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["policy"] != "full":
            found[row["policy"], row["budget"]].append(row)
    return dict(found)


def question(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is an answer to."""
    return (row["text"],) if "text" in row else (row["task"], row.get("length"), row["id"])


def once(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows of the same question, policy and budget the last one."""
    return list({(question(row), row["policy"], row["budget"]): row for row in rows}.values())


def finished(
    rows: list[dict[str, Any]], among: Collection[tuple[str, str]] | None = None
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Rows of caches that have answered the same questions, as many rows as possible, and which caches have not.

    Args:
        among: policies and budgets whose questions decide; None = all.
    """
    asked: dict[tuple[str, str], set[Any]] = defaultdict(set)
    for row in rows:
        asked[row["policy"], row["budget"]].add(question(row))
    deciding = {variant: found for variant, found in asked.items() if among is None or variant in among}
    counts = Counter(each for found in deciding.values() for each in found)
    choices = [{each for each, count in counts.items() if count >= least} for least in set(counts.values())]
    choices += deciding.values()
    wanted = max(choices, key=lambda them: len(them) * sum(found >= them for found in deciding.values()), default=set())
    whole = {variant for variant, found in asked.items() if found >= wanted}
    kept = [row for row in rows if (row["policy"], row["budget"]) in whole and question(row) in wanted]
    return kept, [variant for variant in deciding if variant not in whole]


def together(*tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the prompts that are in all tables; tables without rows do not count."""
    prompts = [{(row["task"], row["id"]) for row in table} for table in tables if table]
    same = set.intersection(*prompts) if prompts else set()
    return [row for table in tables for row in table if (row["task"], row["id"]) in same]


def full_scores(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """The full cache's, by task."""
    return _by_task(_full(rows))


def able(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Tasks that the model can do."""
    return [task for task, found in full_scores(rows).items() if fmean(found) >= ABLE]


def yes_or_no(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether every answer of the full cache is right or wrong, with nothing in between."""
    return all(row["score"] in (0, 1) for row in rows if row["policy"] == "full")


def answered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the prompts that the full cache answers."""
    right = {(row["task"], row["id"]) for row in rows if row["policy"] == "full" and row["score"] == 1}
    return [row for row in rows if (row["task"], row["id"]) in right]


def heading(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Budgets in tokens as shares of what the prompts have."""
    return {
        row["budget"]: f"{row['budget']} tokens ({100 * _share(rows, row['budget']):.0f} %)"
        for row in rows
        if row["budget"].isdecimal()
    }


def _share(rows: Sequence[dict[str, Any]], budget: str) -> float:
    return fmean(row["budget_tokens"] / row["prompt_tokens"] for row in rows if row["budget"] == budget)


def late(row: dict[str, Any], name: str) -> float:
    """Mean of a text's numbers per token over its second half."""
    half = len(row["count"]) // 2
    return float(sum(row[name][half:]) / sum(row["count"][half:]))


def text_tables(rows: list[dict[str, Any]]) -> str:
    """What the second half of the texts loses, and how far it diverges: texts that all variants have read."""
    rows, _ = finished(rows)
    full = {row["text"]: row for row in rows if row["policy"] == "full"}
    found = by_variant(rows)

    lost, far, ranked = {}, {}, defaultdict(list)
    for (policy, budget), group in found.items():
        lost[policy, budget] = cell([late(row, "loss") - late(full[row["text"]], "loss") for row in group], 3)
        far[policy, budget] = cell([late(row, "kl") for row in group], 3)
        ranked[policy].append(fmean(late(row, "kl") for row in group))
    order = {policy: fmean(values) for policy, values in ranked.items()}
    base = fmean(late(row, "loss") for row in full.values())
    return (
        f"{len(full)} texts ({', '.join(sorted(full))}), second half of 1,024 tokens; full cache {base:.3f} nats "
        f"per token. Nats lost:\n\n{grid(lost, order)}\n\nKL divergence from the full cache, nats per token:\n\n"
        f"{grid(far, order)}"
    )


def answer_tables(rows: list[dict[str, Any]]) -> str:
    """Scores and divergences of the tasks that the model is able to do; divergences of the others."""
    rows, _ = finished(rows)
    if all("new_tokens" in row for row in rows):
        return own_tables(rows)
    if yes_or_no(rows) and answered(rows):
        return needle_tables(rows)
    scores = full_scores(rows)
    good = able(rows)
    listed = ", ".join(f"{task} {100 * fmean(found):.0f} (n = {len(found)})" for task, found in scores.items())
    parts = [f"Full cache, %: {listed}."]
    chosen = by_variant(row for row in rows if row["task"] in good)
    if chosen:
        order = _order(chosen)
        right = {key: cell([100 * row["score"] for row in group], 0) for key, group in chosen.items()}
        far = {key: apart(group) for key, group in chosen.items()}
        parts.append(f"Accuracy in %, {', '.join(good)}:\n\n{grid(right, order)}")
        parts.append(f"KL divergence along the full cache's answers, nats per token:\n\n{grid(far, order)}")
    others = by_variant(row for row in rows if row["task"] not in good)
    if others:
        far = {key: apart(group) for key, group in others.items()}
        names = ", ".join(task for task in scores if task not in good)
        parts.append(f"Too hard for this model ({names}): KL divergence alone\n\n{grid(far, _order(others))}")
    return "\n\n".join(parts)


def own_tables(rows: list[dict[str, Any]]) -> str:
    """Answers that every cache gave by itself: their scores, and how they went on and ended."""
    scores = full_scores(rows)
    count = sum(map(len, scores.values()))
    parts = [f"{count} answers of each cache's own.\n\n{course_table(rows)}"]
    if len(scores) > 1:
        variants = {key: _by_task(group) for key, group in {("full", ""): _full(rows), **by_variant(rows)}.items()}
        names = [f"{policy} {budget}".strip() for policy, budget in variants]
        lines = [("task", "n", *(f"`{name}`" for name in names)), ("---", *["---:"] * (1 + len(names)))]
        for task, found in scores.items():
            each = (f"{100 * fmean(tasks[task]):.0f}" for tasks in variants.values())
            lines.append((task, str(len(found)), *each))
        table = piped(lines)
        parts.append(f"<details><summary>Mean score by task</summary>\n\n{table}\n\n</details>")
    return "\n\n".join(parts)


def course_table(rows: list[dict[str, Any]]) -> str:
    """Score, length, end and repetition of answers, and the two differences to the full cache's that are paired."""
    full = {question(row): row for row in _full(rows)}
    header = ("policy", "budget", "score", "less", "tokens", "ended, %", "repeated, %", "more")
    lines = [header, ("---", *["---:"] * (len(header) - 1))]
    variants = {("full", ""): list(full.values()), **by_variant(rows)}
    for (policy, budget), group in variants.items():
        apart = {
            name: cell([100 * sign * (row[name] - full[question(row)][name]) for row in group], 0)
            for name, sign in (("score", -1), ("repeated", 1))
        }
        score, said, repeated = (
            cell([scale * row[name] for row in group], 0)
            for name, scale in (("score", 100), ("new_tokens", 1), ("repeated", 100))
        )
        ended = percent([{"score": float(row["ended"])} for row in group])
        less, more = ("", "") if policy == "full" else (apart["score"], apart["repeated"])
        lines.append((f"`{policy}`", budget, score, less, said, ended, repeated, more))
    return piped(lines)


def _full(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["policy"] == "full"]


def _by_task(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[row["task"]].append(row["score"])
    return found


def needle_tables(rows: list[dict[str, Any]]) -> str:
    """Of the prompts that the full cache answers: how many each policy does, and its divergence."""
    listed = ", ".join(
        f"{task.removeprefix('ruler_niah_')} {sum(found):.0f} of {len(found)}"
        for task, found in full_scores(rows).items()
    )
    right = answered(rows)
    found, names = by_variant(right), heading(rows)
    order = _order(found)
    score = {(policy, names.get(budget, budget)): percent(group) for (policy, budget), group in found.items()}
    far = {(policy, names.get(budget, budget)): apart(group) for (policy, budget), group in found.items()}
    held = {
        (policy, names.get(budget, budget)): cell([100 * row["hit_rate"] for row in group if "hit_rate" in row], 0)
        for (policy, budget), group in found.items()
        if any("hit_rate" in row for row in group)
    }
    hits = f"\n\nHit rate, %:\n\n{grid(held, order)}" if held else ""
    return (
        f"The full cache answers {sum(row['policy'] == 'full' for row in right)} prompts ({listed}). Of these, in %:"
        f"\n\n{grid(score, order)}\n\nKL divergence along its answers, nats per token:\n\n{grid(far, order)}{hits}"
    )


def percent(group: Sequence[dict[str, Any]]) -> str:
    """The share that is right, and its standard error (with one more right and one more wrong, so that 0 has one)."""
    right, count = sum(row["score"] for row in group), len(group)
    likely = (right + 1) / (count + 2)
    return f"{100 * right / count:.0f} ± {100 * sqrt(likely * (1 - likely) / count):.0f}"


def _order(found: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, float]:
    means: dict[str, list[float]] = defaultdict(list)
    for (policy, _), group in found.items():
        means[policy].append(divergence(group))
    return {policy: fmean(values) for policy, values in means.items()}


def front_table(name: str = "smollm2", tokens: str = QUARTER, share: str = "25%") -> str:
    """One budget, one line per policy: running text, and questions that were not known and known."""
    texts, _ = finished(load(name, "text"))
    full = {row["text"]: row for row in texts if row["policy"] == "full"}
    lost = {
        policy: cell([late(row, "loss") - late(full[row["text"]], "loss") for row in group], 2)
        for (policy, size), group in by_variant(texts).items()
        if size == share
    }
    columns = [_needles(name, asked, tokens) for asked in ("unknown", "known")]
    if not all("auto" in column for column in columns):
        return "No rows."
    lines = [
        ("policy", "text: nats lost", "unknown: right, %", "KL", "known: right, %", "KL"),
        ("---", *("---:" for _ in range(5))),
    ]
    for policy in sorted(
        set(columns[0]) & set(columns[1]), key=lambda policy: fmean(divergence(column[policy]) for column in columns)
    ):
        pairs = [text for column in columns for text in (percent(column[policy]), apart(column[policy]))]
        lines.append((f"`{policy}`", lost.get(policy, "not run"), *pairs))
    counts = (str(len(column["auto"])) for column in columns)
    return f"{piped(lines)}\n\n{len(full)} texts; the same {' and '.join(counts)} prompts under all policies."


def _needles(name: str, asked: str, tokens: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by policy, over the same prompts that the full cache answers."""
    alone = {"former": "calibrated", "auto": "auto"}  # of tables with other policies, over fewer prompts
    tables = [load(name, f"needles_{asked}")]
    for table, policy in alone.items():
        tables.append([row for row in load(name, f"{table}_{asked}") if row["policy"] in (policy, "full")])
    found = by_variant(answered(together(*(finished(rows)[0] for rows in tables))))
    return {policy: group for (policy, size), group in found.items() if size == tokens}


def task_table(name: str, asked: str, tokens: str = QUARTER) -> str:
    """One budget: policies down, tasks across; what each answers in %."""
    found = _needles(name, asked, tokens)
    if not found:
        return "No rows."
    counts = Counter(row["task"] for row in next(iter(found.values())))
    headers = [f"{task.removeprefix('ruler_niah_')} (n = {count})" for task, count in counts.items()]
    lines = [("policy", *headers), ("---", *["---:"] * len(headers))]
    for policy in sorted(found, key=lambda policy: -fmean(row["score"] for row in found[policy])):
        groups = ([row for row in found[policy] if row["task"] == task] for task in counts)
        lines.append((f"`{policy}`", *map(percent, groups)))
    return piped(lines)

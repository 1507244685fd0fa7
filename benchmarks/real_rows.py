"""The rows of real models that are kept: their files, their protocols, and which of them may be compared."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from common import RESULTS

KEPT = RESULTS / "real_models"
Row = dict[str, Any]
#: Rows by policy and budget, or what else stands in the columns of a table.
Groups = dict[tuple[str, str], list[Row]]
#: Below this mean score of the full cache a task says nothing of caches.
_ABLE = 0.6
#: Settings that change no number, or that the rows tell by themselves.
_PASSED_OVER = frozenset(
    "agreement allow_pickle attn_implementation batch_size budgets data_dir device device_map files haystack hit_rate "
    "limit model policies share_prefill task_file tasks tensor_parallel tokenizer trust_remote_code".split()
)


# ---- files and protocols --------------------------------------------------------------------------------------------


@cache
def read_kept(path: Path) -> tuple[Row, list[Row]]:
    """Facts and rows of a file of kept rows."""
    facts, *rows = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
    return facts, rows


def load(name: str, table: str) -> list[Row]:
    """The rows of a model's table; none if it was not run."""
    path = KEPT / f"{name}_{table}.jsonl.gz"
    return read_kept(path)[1] if path.exists() else []


def protocol(name: str, meta: dict[str, Any]) -> dict[str, Any]:
    """What has to be equal for rows to share a table, from what the run of a model wrote down of itself."""
    settings = {key: value for key, value in meta["settings"].items() if key not in _PASSED_OVER}
    data = {task: facts["sha256"] for task, facts in meta.get("tasks", {}).items() if facts.get("sha256")}
    model = {key: meta.get("model", {}).get(key) for key in ("class", "parameters")}
    precision = meta.get("model", {}).get("dtype", settings.get("dtype"))
    terms = {"model": name, **model, "of": "texts" if "files" in meta["settings"] else "tasks", **settings, **data}
    return {**terms, "dtype": precision, "transformers": meta["versions"]["transformers"]}


def told(terms: dict[str, Any]) -> dict[str, Any]:
    """A protocol without what is off: an option that came later makes no other protocol of a run without it."""

    def off(key: str, value: Any) -> bool:
        return key not in ("question_aware", "seed") and (value in (None, "drop", []) or value == 0)

    return {key: value for key, value in terms.items() if not off(key, value)}


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two protocols differ in, but for the records of tasks that one of them does not have."""
    before, now = told(before), told(now)
    both = before.keys() & now.keys()
    apart = [key for key, value in (before | now).items() if key in both or not isinstance(value, dict)]
    return sorted(key for key in apart if before.get(key) != now.get(key))


def tables(folder: Path = KEPT) -> list[tuple[dict[str, int], dict[str, Any] | None, list[Row]]]:
    """Prompts per task (or texts) by file, protocol and rows, for each table of the leaderboard."""
    groups: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        name = path.name.removesuffix(".jsonl.gz")
        facts, rows = read_kept(path)
        terms = told(facts["protocol"]) if facts.get("protocol") else None
        key = json.dumps(terms, sort_keys=True) if terms else name
        files, _, every = groups.setdefault(key, [{}, terms, []])
        files[name] = max(Counter(row.get("task") for row in {question(row): row for row in rows}.values()).values())
        every += rows
    return [(files, terms, once(rows)) for files, terms, rows in groups.values()]


# ---- which rows -----------------------------------------------------------------------------------------------------


def question(row: Row) -> tuple[Any, ...]:
    """What a row is an answer to."""
    return (row["text"],) if "text" in row else (row["task"], row.get("length"), row["id"])


def prompt(row: Row) -> tuple[str, str]:
    """Of a row of tasks."""
    return row["task"], row["id"]


def once(rows: Iterable[Row]) -> list[Row]:
    """Of rows of the same question, policy and budget the last one."""
    return list({(question(row), row["policy"], row["budget"]): row for row in rows}.values())


def finished(
    rows: Sequence[Row], among: Collection[tuple[str, str]] | None = None
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows of caches that have answered the same questions, as many rows as possible, and which caches have not.

    Args:
        among: policies and budgets whose questions decide; None = all.
    """
    asked: dict[tuple[str, str], set[Any]] = defaultdict(set)
    for row in rows:
        asked[row["policy"], row["budget"]].add(question(row))
    deciding = {variant: questions for variant, questions in asked.items() if among is None or variant in among}
    counts = Counter(each for questions in deciding.values() for each in questions)
    choices = [{each for each, count in counts.items() if count >= least} for least in set(counts.values())]
    choices += deciding.values()
    wanted = max(choices, key=lambda them: len(them) * sum(each >= them for each in deciding.values()), default=set())
    whole = {variant for variant, questions in asked.items() if questions >= wanted}
    kept = [row for row in rows if (row["policy"], row["budget"]) in whole and question(row) in wanted]
    return kept, [variant for variant in deciding if variant not in whole]


def by_variant(rows: Iterable[Row], column: str = "budget") -> Groups:
    """Rows of each policy and budget, those of the full cache left out."""
    groups: Groups = defaultdict(list)
    for row in rows:
        if row["policy"] != "full":
            groups[row["policy"], row[column]].append(row)
    return dict(groups)


def full(rows: Iterable[Row]) -> list[Row]:
    """Those of the full cache."""
    return [row for row in rows if row["policy"] == "full"]


def by_task(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Scores."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        scores[row["task"]].append(row["score"])
    return scores


def able(rows: Iterable[Row]) -> list[str]:
    """Tasks that the model can do."""
    return [task for task, scores in by_task(full(rows)).items() if fmean(scores) >= _ABLE]


def answered(rows: Sequence[Row]) -> list[Row]:
    """Rows of the prompts that the full cache answers."""
    right = {prompt(row) for row in full(rows) if row["score"] == 1}
    return [row for row in rows if prompt(row) in right]


# ---- numbers --------------------------------------------------------------------------------------------------------


def late(row: Row, name: str) -> float:
    """Mean of a text's numbers per token over its second half."""
    half = len(row["count"]) // 2
    return float(sum(row[name][half:]) / sum(row["count"][half:]))


def divergence(group: Iterable[Row]) -> float:
    """Mean of answers from the full cache's, nats per token."""
    return fmean(row["agreement"]["kl"] for row in group)


def cell(values: Iterable[float], digits: int = 0) -> str:
    """Mean and its standard error."""
    values = list(values)
    error = f" ± {stdev(values) / sqrt(len(values)):.{digits}f}" if len(values) > 2 else ""
    return f"{fmean(values):.{digits}f}{error}"


def apart(group: Iterable[Row], digits: int = 2) -> str:
    """Divergence and its standard error."""
    return cell([row["agreement"]["kl"] for row in group], digits)


def percent(group: Sequence[Row], name: str = "score") -> str:
    """The share that is right, and its standard error (with one more right and one more wrong, so that 0 has one)."""
    right, count = float(sum(row[name] for row in group)), len(group)
    likely = (right + 1) / (count + 2)
    return f"{100 * right / count:.0f} ± {100 * sqrt(likely * (1 - likely) / count):.0f}"

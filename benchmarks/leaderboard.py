"""The leaderboard of real models: every row that is kept, in one table per protocol.

    python benchmarks/leaderboard.py                 # benchmarks/results/real_models -> docs/leaderboard.md

A protocol is all that decides a number but the policy and the budget: the model, every setting of the run, the digests
of prompts and records, the version of transformers. Rows of different files share a table if theirs are equal, and
never otherwise; files that are older than the protocol stay alone.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from real_tables import KEPT, answer_tables, finished, once, question, read_kept, text_tables

PAGE = Path("docs/leaderboard.md")
#: Settings that change no number, or that the rows tell by themselves.
_PASSED_OVER = frozenset(
    "agreement allow_pickle attn_implementation batch_size budgets data_dir device device_map files haystack hit_rate "
    "limit model policies share_prefill task_file tasks tensor_parallel tokenizer trust_remote_code".split()
)
_HEAD = """# Leaderboard of real models

Every row of `benchmarks/results/real_models`, written by `python benchmarks/leaderboard.py`. **One table is one
protocol**: the model, all settings of the run but policy and budget, prompts, records and the version of transformers
are the same, or the rows stand in another table. Numbers of different tables are not to be compared. All that a table
shows is over the same questions; what has not answered all of them has a table of its own, over those that it has, with
whatever else has answered these. `calibrated` and `calibrated@global` are the calibration that comes with the package,
with four first tokens and an eighth of the budget for the newest: what `auto` was before it looked at queries.
What the columns mean, and what can be said of them: [real models](real_models/index.md). Each table names the commands
of its rows, `python benchmarks/real_models.py run ...`, with the most prompts per task that any of its policies has
read; `--policies` and `--budgets` choose among them. Your own model gets such tables from `paged-eviction eval --model
YOURS --agreement` and `paged-eviction report`.
"""


def protocol(name: str, meta: dict[str, Any]) -> dict[str, Any]:
    """What has to be equal for rows to share a table.

    Args:
        name: of the model.
        meta: what the run wrote down of itself.
    """
    settings = {key: value for key, value in meta["settings"].items() if key not in _PASSED_OVER}
    data = {task: facts["sha256"] for task, facts in meta.get("tasks", {}).items() if facts.get("sha256")}
    model = {key: meta.get("model", {}).get(key) for key in ("class", "parameters")}
    precision = meta.get("model", {}).get("dtype", settings.get("dtype"))
    found = {"model": name, **model, "of": "texts" if "files" in meta["settings"] else "tasks", **settings, **data}
    return {**found, "dtype": precision, "transformers": meta["versions"]["transformers"]}


def told(found: dict[str, Any]) -> dict[str, Any]:
    """A protocol without what is off: an option that came later makes no other protocol of a run without it."""

    def off(key: str, value: Any) -> bool:
        return key not in ("question_aware", "seed") and (value in (None, "drop", []) or value == 0)

    return {key: value for key, value in found.items() if not off(key, value)}


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two protocols differ in, but for the records of tasks that one of them does not have."""
    before, now = told(before), told(now)
    both = before.keys() & now.keys()
    apart = [key for key, value in (before | now).items() if key in both or not isinstance(value, dict)]
    return sorted(key for key in apart if before.get(key) != now.get(key))


def tables(folder: Path = KEPT) -> list[tuple[dict[str, int], dict[str, Any] | None, list[dict[str, Any]]]]:
    """Prompts per task (or texts) by file, protocol and rows, for each table."""
    groups: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        name = path.name.removesuffix(".jsonl.gz")
        facts, rows = read_kept(path)
        found = told(facts["protocol"]) if facts.get("protocol") else None
        key = json.dumps(found, sort_keys=True) if found else name
        files, _, every = groups.setdefault(key, [{}, found, []])
        files[name] = max(Counter(row.get("task") for row in {question(row): row for row in rows}.values()).values())
        every += rows
    return [(files, found, once(rows)) for files, found, rows in groups.values()]


def page(folder: Path = KEPT) -> str:
    """The whole page."""
    parts = [_HEAD]
    for files, found, every in tables(folder):
        if not any(row["policy"] != "full" for row in every):
            continue
        parts.append(f"## {next(iter(files)).replace('_', ' ')}\n")
        said = _described(found) if found else "Its protocol was not written down: these rows stay alone."
        parts.append(f"{said}\n")
        parts.append(f"Run: {', '.join(_command(name, limit) for name, limit in files.items())}.\n")
        rows, left_out = finished(every)
        parts.append(_tables(rows))
        while left_out:
            rows, later = finished(every, left_out)
            names = ", ".join(f"`{policy}` at {budget}" for policy, budget in left_out if (policy, budget) not in later)
            parts += [f"Over other questions, for the sake of {names}:\n", _tables(rows)]
            left_out = later
    return "\n".join(parts)


def _command(name: str, limit: int) -> str:
    model, _, table = name.partition("_")
    return f"`{table} --name {model} --limit {limit}`"


def _tables(rows: list[dict[str, Any]]) -> str:
    return f"{text_tables(rows) if 'text' in rows[0] else answer_tables(rows)}\n"


def _described(found: dict[str, Any]) -> str:
    return f"Protocol: {', '.join(f'{name} {_word(value)}' for name, value in found.items())}."


def _word(value: Any) -> str:
    """Digests by their beginning."""
    if isinstance(value, dict):
        return "/".join(str(each)[:8] for each in value.values())
    if isinstance(value, list):
        return ", ".join(map(_word, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")

"""The tables of real models: each is one command, resumable, and its rows are kept.

    python benchmarks/real_models.py run text --name smollm2 --model results/models/SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/real_models.py keep            # rows of results/real_models -> benchmarks/results/real_models
    python benchmarks/real_models.py page            # their tables -> docs/real_models.md, docs/leaderboard.md

`run` is `paged-eviction eval` with the options of `TABLES`; run again it goes on where it stopped, with a higher
`--limit` it grows. A prompt is read once for all policies and budgets, and each cache is then fed the full cache's
answer in one forward (`--teacher-forced`): its score, and the divergence of its next tokens, come from that.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from common import RESULTS
from results_page import replace_section

ROOT = Path("results/real_models")
KEPT = RESULTS / "real_models"
PAGE = Path("docs/real_models.md")
FORCED = "--agreement --teacher-forced"
SMALL = "paged_eviction,keydiff,random,streaming_llm"
OTHERS = f"auto@uniform,{SMALL},snapkv,tova,expected_attention"
CHEAP = f"auto,{OTHERS}"
#: Which the model answers in 60 % of the cases; of the last two no prompt was looked at when the default was chosen.
NEEDLES = (
    "passkey,ruler_niah_single_1,ruler_niah_single_2,ruler_niah_multikey_1,ruler_niah_single_3,ruler_niah_multikey_2"
)
#: About 890 tokens without their answers, so that these are an eighth and a quarter.
EIGHTH, QUARTER = "112", "224"
RULER = ",".join(
    f"ruler_{name}"
    for name in (
        "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 niah_multivalue "
        "niah_multiquery vt cwe fwe qa_1 qa_2"
    ).split()
)
QUESTION = {"unknown": "--question-agnostic", "known": "--question-aware"}


def _tables() -> dict[str, str]:
    """Options of `paged-eviction eval` by table; {texts} are files that are made, {data} is what --data names."""
    given = "--text {texts} --length 1024 --agreement"
    texts = f"{given} --policies {CHEAP}"
    found = {
        "text": f"{texts},h2o --chunk 64 --budgets 25%,50%,full",
        "text_auto": f"{given} --policies auto --chunk 64 --budgets 25%,50%,full",
        "tokens": f"{texts},h2o --chunk 1 --budgets 25%,full",
        "longbench": "--tasks all21 --data-dir {data} --max-length 2048 --agreement --budgets 25%,full "
        "--policies auto,snapkv,keydiff,streaming_llm",
        "longeval": f"--tasks longeval {FORCED} --length 1024,4096 --budgets 12.5%,25%,50%,full --policies {CHEAP}",
        "turns": f"--tasks conversation --question-agnostic {FORCED} --length 2048 --budgets 12.5%,25%,full "
        f"--policies {CHEAP}",
    }
    for name, flag in QUESTION.items():
        asked = f"{flag} {FORCED}"
        needles = f"--tasks {NEEDLES} {asked}"
        found |= {
            f"needles_{name}": f"{needles} --budgets {EIGHTH},{QUARTER},full --policies {OTHERS},compactor",
            f"auto_{name}": f"{needles} --budgets {EIGHTH},{QUARTER},448,full --policies auto",
            f"half_{name}": f"{needles} --budgets 448,full --policies auto@uniform,tova,keydiff",
            f"kvzip_{name}": f"{needles} --budgets {EIGHTH},{QUARTER},full --policies kvzip@global,kvzip",
            f"ruler_{name}": f"--tasks {RULER} --length 1024,2048,4096 {asked} --budgets 6%,12.5%,25%,50%,full "
            f"--policies {CHEAP},compactor,h2o,cake@cake,snapkv@ada_kv,keydiff@ada_kv,snapkv@pyramid",
        }
    bytes_ = f"--tasks {NEEDLES} --question-agnostic {FORCED} --memory 3MiB,6MiB,full"
    found |= {f"bits{bits}": f"{bytes_} --bits {bits} --policies auto,keydiff,tova" for bits in (4, 8)}
    return found | {"bytes": f"{bytes_} --policies auto,keydiff,tova"}


TABLES = _tables()
#: Below this mean score of the full cache a task says nothing of caches.
ABLE = 0.6


# ---- run ------------------------------------------------------------------------------------------------------------


def write_texts(folder: Path, count: int = 8, prose: Path | None = None) -> list[Path]:
    """Documentation, code and, from a folder of LongBench records, prose: files of JSON lines."""
    from pydoc_data.topics import topics

    from hf_paged_eviction_eval.texts import read_texts

    pages = [topics[name] for name in sorted(topics) if len(topics[name]) > 9000]
    kinds = {"documentation": pages, "code": [text.content for text in read_texts(()) if len(text.content) > 12000]}
    if prose is not None:
        kinds["prose"] = _contexts(prose / "gov_report.jsonl")
        kinds["meeting"] = _contexts(prose / "qmsum.jsonl")
    kinds["manual"] = pages[::-1]  # far from what the calibration was fitted to, which is the first of them
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for kind, texts in kinds.items():
        files.append(folder / f"{kind}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:count]), "utf-8")
    return files


def _contexts(records: Path) -> list[str]:
    lines = records.read_text("utf-8").splitlines()
    return list(dict.fromkeys(json.loads(line)["context"][2000:22000] for line in lines))


def run(options: argparse.Namespace) -> None:
    """One table, as far as it is missing."""
    values = {"data": str(options.data or "")}
    if "{texts}" in TABLES[options.table]:
        values["texts"] = " ".join(map(str, write_texts(ROOT / "texts", prose=options.data)))
    command = ["-m", "hf_paged_eviction_eval", "eval", "--model", options.model, "--workers", str(options.workers)]
    command += TABLES[options.table].format(**values).split()
    if options.limit is not None:
        command += ["--limit", str(options.limit)]
    subprocess.run([sys.executable, *command, "--output", str(ROOT / options.name / options.table)], check=True)


# ---- keep -----------------------------------------------------------------------------------------------------------


def keep() -> None:
    """Copy what the tables need of all rows, compressed, and the protocol under which they were measured."""
    import leaderboard

    for path in sorted(ROOT.glob("*/*/results.jsonl")):
        rows = [_short(json.loads(line)) for line in path.read_text("utf-8").splitlines()]
        meta = json.loads((path.parent / "run_meta.json").read_text("utf-8"))
        facts = {name: meta[name] for name in ("versions", "hardware") if name in meta}
        facts["protocol"] = leaderboard.protocol(path.parent.parent.name, meta)
        target = KEPT / f"{path.parent.parent.name}_{path.parent.name}.jsonl.gz"
        target.parent.mkdir(exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in [facts, *rows])
        target.write_bytes(gzip.compress(lines.encode(), mtime=0))
        print(f"{target}: {len(rows)} rows")


def _short(row: dict[str, Any]) -> dict[str, Any]:
    names = ("policy", "budget", "budget_tokens", "block_size")
    if "text" in row:
        row = row | {"text": Path(row["text"]).name}
        return {name: row[name] for name in (*names, "text", "tokens", "loss", "count", "kl")}
    return {name: row[name] for name in (*names, "task", "length", "id", "prompt_tokens", "score", "agreement")}


def load(name: str, table: str) -> list[dict[str, Any]]:
    """The rows of a model's table; none if it was not run."""
    path = KEPT / f"{name}_{table}.jsonl.gz"
    if not path.exists():
        return []
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()][1:]


# ---- page -----------------------------------------------------------------------------------------------------------


def cell(values: Sequence[float], digits: int) -> str:
    """Mean and its standard error."""
    error = f" ± {stdev(values) / sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error}"


def grid(cells: dict[tuple[str, str], str], ranked: dict[str, float]) -> str:
    """Policies down, the best first; budgets across."""
    budgets = list(dict.fromkeys(budget for _, budget in cells))
    lines = [("policy", *budgets), ("---", *("---:" for _ in budgets))]
    for policy in sorted(ranked, key=ranked.__getitem__):
        lines.append((f"`{policy}`", *(cells.get((policy, budget), "") for budget in budgets)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_variant(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rows of each policy and budget, those of the full cache left out."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["policy"] != "full":
            found[row["policy"], row["budget"]].append(row)
    return dict(found)


def complete(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of prompts that all caches have answered: a run may still be under way."""
    answered: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        answered[row["task"], row["id"]] += 1
    most = max(answered.values(), default=0)
    return [row for row in rows if answered[row["task"], row["id"]] == most]


def together(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the prompts that are in both tables; those of the first if the second has none."""
    prompts = [{(row["task"], row["id"]) for row in table} for table in (rows, others or rows)]
    return [row for row in (*rows, *others) if (row["task"], row["id"]) in prompts[0] & prompts[1]]


def complete_texts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of texts that all caches have read."""
    read: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        read[row["policy"], row["budget"]].add(row["text"])
    shared = set.intersection(*read.values()) if read else set()
    return [row for row in rows if row["text"] in shared]


def full_scores(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """The full cache's, by task."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["policy"] == "full":
            scores[row["task"]].append(row["score"])
    return dict(scores)


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
    rows = complete_texts(rows)
    full = {row["text"]: row for row in rows if row["policy"] == "full"}
    found = by_variant(rows)

    lost, apart, ranked = {}, {}, defaultdict(list)
    for (policy, budget), group in found.items():
        lost[policy, budget] = cell([late(row, "loss") - late(full[row["text"]], "loss") for row in group], 3)
        apart[policy, budget] = cell([late(row, "kl") for row in group], 3)
        ranked[policy].append(fmean(late(row, "kl") for row in group))
    order = {policy: fmean(values) for policy, values in ranked.items()}
    base = fmean(late(row, "loss") for row in full.values())
    return (
        f"{len(full)} texts ({', '.join(sorted(full))}), second half of 1,024 tokens; full cache {base:.3f} nats "
        f"per token. Nats lost:\n\n{grid(lost, order)}\n\nKL divergence from the full cache, nats per token:\n\n"
        f"{grid(apart, order)}"
    )


def answer_tables(rows: list[dict[str, Any]]) -> str:
    """Scores and divergences of the tasks that the model is able to do; divergences of the others."""
    rows = complete(rows)
    if yes_or_no(rows):
        return needle_tables(rows)
    scores = full_scores(rows)
    good = able(rows)
    listed = ", ".join(f"{task} {100 * fmean(found):.0f} (n = {len(found)})" for task, found in scores.items())
    parts = [f"Full cache, %: {listed}."]
    chosen = by_variant(row for row in rows if row["task"] in good)
    if chosen:
        order = _order(chosen)
        right = {key: cell([100 * row["score"] for row in group], 0) for key, group in chosen.items()}
        apart = {key: cell([row["agreement"]["kl"] for row in group], 2) for key, group in chosen.items()}
        parts.append(f"Accuracy in %, {', '.join(good)}:\n\n{grid(right, order)}")
        parts.append(f"KL divergence along the full cache's answers, nats per token:\n\n{grid(apart, order)}")
    others = by_variant(row for row in rows if row["task"] not in good)
    if others:
        apart = {key: cell([row["agreement"]["kl"] for row in group], 2) for key, group in others.items()}
        names = ", ".join(task for task in scores if task not in good)
        parts.append(f"Too hard for this model ({names}): KL divergence alone\n\n{grid(apart, _order(others))}")
    return "\n\n".join(parts)


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
    apart = {
        (policy, names.get(budget, budget)): cell([row["agreement"]["kl"] for row in group], 2)
        for (policy, budget), group in found.items()
    }
    return (
        f"The full cache answers {sum(row['policy'] == 'full' for row in right)} prompts ({listed}). Of these, in %:"
        f"\n\n{grid(score, order)}\n\nKL divergence along its answers, nats per token:\n\n{grid(apart, order)}"
    )


def percent(group: Sequence[dict[str, Any]]) -> str:
    """The share that is right, and its standard error (with one more right and one more wrong, so that 0 has one)."""
    right, count = sum(row["score"] for row in group), len(group)
    likely = (right + 1) / (count + 2)
    return f"{100 * right / count:.0f} ± {100 * sqrt(likely * (1 - likely) / count):.0f}"


def _order(found: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, float]:
    means: dict[str, list[float]] = defaultdict(list)
    for (policy, _), group in found.items():
        means[policy].append(fmean(row["agreement"]["kl"] for row in group))
    return {policy: fmean(values) for policy, values in means.items()}


def front_table(name: str = "smollm2", tokens: str = QUARTER, share: str = "25%") -> str:
    """One budget, one line per policy: running text, and questions that were not known and known."""
    texts, more = complete_texts(load(name, "text")), complete_texts(load(name, "text_auto"))
    shared = {row["text"] for row in texts}
    texts = [*texts, *(row for row in more if row["policy"] == "auto" and row["text"] in shared)]
    full = {row["text"]: row for row in texts if row["policy"] == "full"}
    lost = {
        policy: cell([late(row, "loss") - late(full[row["text"]], "loss") for row in group], 2)
        for (policy, size), group in by_variant(texts).items()
        if size == share
    }
    columns: list[dict[str, list[dict[str, Any]]]] = []
    for table in ("unknown", "known"):
        rows = together(complete(load(name, f"needles_{table}")), complete(load(name, f"auto_{table}")))
        found = by_variant(answered(rows))
        columns.append({policy: group for (policy, size), group in found.items() if size == tokens})
    lines = [
        ("policy", "text: nats lost", "unknown: right, %", "KL", "known: right, %", "KL"),
        ("---", *("---:" for _ in range(5))),
    ]
    for policy in sorted(set(columns[0]) & set(columns[1]), key=lambda policy: _apart(columns, policy)):
        pairs = [
            text
            for column in columns
            for text in (percent(column[policy]), cell([row["agreement"]["kl"] for row in column[policy]], 2))
        ]
        lines.append((f"`{policy}`", lost.get(policy, "not run"), *pairs))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _apart(columns: list[dict[str, list[dict[str, Any]]]], policy: str) -> float:
    return fmean(fmean(row["agreement"]["kl"] for row in column[policy]) for column in columns)


def page() -> None:
    """Write every table that has rows and a place on the page, the leaderboard, and the README's front table."""
    import leaderboard

    text = replace_section(PAGE.read_text("utf-8"), "front", front_table())
    readme = Path("README.md")
    readme.write_text(replace_section(readme.read_text("utf-8"), "front", front_table()), "utf-8")
    for path in sorted(KEPT.glob("*.jsonl.gz")):
        name, _, table = path.name.removesuffix(".jsonl.gz").partition("_")
        section = f"{name}_{table}"
        if f"<!-- {section}:begin -->" in text:
            rows = load(name, table)
            if not (rows[0].get("task") or complete_texts(rows)):
                continue  # no text is through yet
            text = replace_section(text, section, text_tables(rows) if "text" in rows[0] else answer_tables(rows))
            print(f"written: {section}")
    PAGE.write_text(text, "utf-8")
    leaderboard.PAGE.write_text(leaderboard.page(), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("table", choices=TABLES)
    running.add_argument("--model", required=True, help="as of paged-eviction eval")
    running.add_argument("--name", required=True, help="what the rows call it")
    running.add_argument("--data", type=Path, help="folder of LongBench records, for longbench and for prose")
    running.add_argument("--limit", type=int)
    running.add_argument("--workers", type=int, default=2)
    commands.add_parser("keep")
    commands.add_parser("page")
    options = parser.parse_args()
    {"run": lambda: run(options), "keep": keep, "page": page}[options.command]()


if __name__ == "__main__":
    main()

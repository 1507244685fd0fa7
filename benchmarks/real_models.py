"""The tables of real models: each is one command, resumable, and its rows are kept.

    python benchmarks/real_models.py run text --name smollm2 --model results/models/SmolLM2-135M-Instruct.Q4_1
    python benchmarks/real_models.py keep            # rows of results/real_models -> benchmarks/results/real_models
    make docs-pages                                  # their tables -> docs/real_models.md

`run` is `paged-eviction eval` with the options of `TABLES`, and those behind them in their place (`--policies auto`);
run again it goes on where it stopped, with a higher `--limit` it grows. A prompt is read once for all policies and
budgets, and each cache is then fed the full cache's answer in one forward (`--teacher-forced`): its score, and the
divergence of its next tokens, come from that.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path

from real_rows import EIGHTH, KEPT, QUARTER, Row, changed, protocol, read_kept

from hf_paged_eviction_eval.store.checks import row_key
from hf_paged_eviction_eval.store.results import ROWS, read_folder

ROOT = Path("results/real_models")
FORCED = "--agreement --teacher-forced"
OTHERS = "auto@uniform,paged_eviction,keydiff,random,recency,streaming_llm,snapkv,tova,expected_attention"
#: Every policy of the library that needs no file.
EVERY = "auto,auto@uniform,all"
#: Every allocator, around a policy of its paper where it has one, and around the same policy.
ALLOCATORS = "cake@cake,h2o@d2o,snapkv@ada_kv,snapkv@cake,snapkv@d2o,snapkv@pyramid,keydiff@ada_kv"
#: Policies of which heads may evict together or apart.
APART = (
    "paged_eviction,keydiff,key_norm,value_norm,lagkv,leverage,snapkv,h2o,expected_attention,r_kv,sage_kv,cake,"
    "scissorhands,lazy_eviction,roco,lru,random,tova"
)
#: Which the model answers in 60 % of the cases; of the last two no prompt was looked at when the default was chosen.
NEEDLES = (
    "passkey,ruler_niah_single_1,ruler_niah_single_2,ruler_niah_multikey_1,ruler_niah_single_3,ruler_niah_multikey_2"
)
#: Base models: they go on behind an answer, say it again, and a cache that is fed that needs to have kept nothing.
BASE = ("gemma3",)
QUESTION = {"unknown": "--question-agnostic", "known": "--question-aware"}
_TEXTS, _NEEDLES = "--text {texts} --length 1024 --agreement --chunk", f"--tasks {NEEDLES} {FORCED}"
#: Options of `paged-eviction eval` by table: policies, budgets beside the full one, and others; a ? stands for whether
#: the question is known. {texts} are files that are made.
_RUNS = f"""
text | {EVERY} | 25% | {_TEXTS} 64
heads_text | paged_eviction,leverage,sage_kv,snapkv,keydiff | 25% | {_TEXTS} 64 --heads separate
needles_? | {OTHERS},compactor | {EIGHTH},{QUARTER} | {_NEEDLES}
auto_? | auto | 56,{EIGHTH},{QUARTER},448 | {_NEEDLES}
every_? | {EVERY},{ALLOCATORS} | 56,{EIGHTH},{QUARTER},448 | {_NEEDLES}
heads_? | {APART} | {EIGHTH},{QUARTER} | {_NEEDLES} --heads separate
"""


def _tables() -> dict[str, str]:
    lines = [line.split(" | ") for line in _RUNS.strip().splitlines()]
    return {
        name.replace("?", side): f"{more} {flag} --policies {policies} --budgets {budgets},full"
        for name, policies, budgets, more in lines
        for side, flag in (QUESTION.items() if "?" in name else [("", "")])
    }


TABLES = _tables()


# ---- run ------------------------------------------------------------------------------------------------------------


def write_texts(folder: Path, count: int = 8, prose: Path | None = None) -> list[Path]:
    """Documentation, code and, from a folder of LongBench records, prose: files of JSON lines."""
    from pydoc_data.topics import topics

    from hf_paged_eviction_eval.data.texts import read_texts

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
    values = {}
    if "{texts}" in TABLES[options.table]:
        values["texts"] = " ".join(map(str, write_texts(ROOT / "texts", prose=options.data)))
    command = ["-m", "hf_paged_eviction_eval", "eval", "--model", options.model, "--workers", str(options.workers)]
    command += TABLES[options.table].format(**values).split()
    if options.name in BASE and FORCED in TABLES[options.table]:
        command.append("--stop-when-right")
    if options.limit is not None:
        command += ["--limit", str(options.limit)]
    command += options.more
    subprocess.run([sys.executable, *command, "--output", str(ROOT / options.name / options.table)], check=True)


# ---- keep -----------------------------------------------------------------------------------------------------------


def keep() -> None:
    """Copy what the tables need of all rows, compressed, and the protocol under which they were measured.

    Rows that were kept before stay, unless they are of another protocol.
    """
    for folder in sorted({path.parent for path in ROOT.glob(f"*/*/{ROWS}")}):
        stored, meta, _ = read_folder(folder, row_key)
        rows = [_short(row) for row in stored.values()]
        facts = {name: meta[name] for name in ("versions", "hardware") if name in meta}
        facts["protocol"] = protocol(folder.parent.name, meta)
        target = KEPT / f"{folder.parent.name}_{folder.name}.jsonl.gz"
        target.parent.mkdir(exist_ok=True)
        facts["protocol"], rows = _beside_kept(target, facts["protocol"], rows)
        lines = "".join(json.dumps(row) + "\n" for row in [facts, *rows])
        target.write_bytes(gzip.compress(lines.encode(), mtime=0))
        print(f"{target}: {len(rows)} rows")


def _beside_kept(target: Path, terms: Row, rows: list[Row]) -> tuple[Row, list[Row]]:
    """Protocol and rows with those that are kept; a table may have been run for other tasks before."""
    if not target.exists():
        return terms, rows
    facts, old_rows = read_kept(target)
    before = facts.get("protocol") or {}
    if other := changed(before, terms):
        print(f"{target}: {len(old_rows)} rows are replaced, since they differ in {', '.join(other)}")
    newest = {(*row_key({"budget_tokens": 0, "length": row.get("tokens"), **row}),): row for row in (*old_rows, *rows)}
    return (terms, rows) if other or not before else (before | terms, list(newest.values()))


def _short(row: Row) -> Row:
    """What the tables need of a row."""
    names = ("policy", "budget", "budget_tokens", "block_size")
    if "text" in row:
        row = row | {"text": Path(row["text"]).name}
        return {name: row[name] for name in (*names, "text", "tokens", "loss", "count", "kl")}
    return {name: row[name] for name in (*names, "task", "length", "id", "prompt_tokens", "score", "agreement")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("table", choices=TABLES)
    running.add_argument("--model", required=True, help="as of paged-eviction eval")
    running.add_argument("--name", required=True, help="what the rows call it")
    running.add_argument("--data", type=Path, help="folder of LongBench records, for texts of prose")
    running.add_argument("--limit", type=int)
    running.add_argument("--workers", type=int, default=2)
    commands.add_parser("keep")
    options, more = parser.parse_known_args()
    if more and options.command != "run":
        parser.error(f"unknown: {' '.join(more)}")
    options.more = more
    run(options) if options.command == "run" else keep()


if __name__ == "__main__":
    main()

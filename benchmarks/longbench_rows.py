r"""LongBench on a real model: keeps what the tables of docs/longbench.md are made of.

    run() {
      paged-eviction eval --model FOLDER --tasks en16 --data-dir RECORDS --max-length 3500 --dtype bfloat16 \
        --batch-size 16 --share-prefill --budgets "12.5% of memory,512" --policies "$1" --output "results/longbench/$2"
    }
    run auto,paged_eviction,snapkv,streaming_llm,full prepared
    HF_PAGED_EVICTION_HOME=$(mktemp -d) run auto without
    python benchmarks/longbench_rows.py qwen-coder-0.5b

The first run is of a model that `paged-eviction prepare` has seen; in the second nobody knows of that.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from common import RESULTS

from hf_paged_eviction_eval.store.results import read_rows

KEPT = RESULTS / "longbench"
#: What a row is kept with, besides what the cache was: no texts, since the records have no licence.
_FIELDS = ("task", "id", "budget", "prompt_tokens", "truncated", "new_tokens", "score")
#: Folders of runs, and what their `auto` is.
_RUNS = ("prepared", "without")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="what the page calls the model")
    parser.add_argument("--runs", type=Path, default=Path("results/longbench"), help="(default: %(default)s)")
    options = parser.parse_args()
    lines = []
    for run in _RUNS:
        for _, _, row in read_rows(options.runs / run):
            cache = run if row["policy"] == "auto" else row["policy"]
            lines.append(json.dumps({"cache": cache, **{name: row[name] for name in _FIELDS}}))
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{options.name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", mtime=0))


if __name__ == "__main__":
    main()

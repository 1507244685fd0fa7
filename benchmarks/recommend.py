"""Is a tenth of the cost enough to choose well? `python benchmarks/recommend.py --help`.

All candidates read all passages, once; then the recommendation is made from nothing in a folder of its own, by the
same command that users have. Reported are how far its choice is from the best of the full grid, what both read, and how
often the search would have chosen well had the passages come in another order: it is replayed on the rows of the grid.

Both folders go on where they were stopped. A model that is not the embedded one: `python -m training.second`.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import RESULTS

from hf_paged_eviction_eval.environment import timed_on
from hf_paged_eviction_eval.options.recommend import RecommendOptions
from hf_paged_eviction_eval.recommend.halving import cost, plan, survivors
from hf_paged_eviction_eval.recommend.run import run_recommend
from hf_paged_eviction_eval.recommend.search import decides, row_key
from hf_paged_eviction_eval.store.results import SUMMARY, read_lines

GRID = {
    "policies": "paged_eviction,keydiff,recency,snapkv",
    "allocators": "uniform,pyramid",
    "bits": "none,8,4",
    "positions": "text,cache",
    "disposals": "drop,merge,recall(blocks=1, summary=vector)",
    "block_size": 8,
    "answer_tokens": 16,
    "prefill_chunk_size": 64,
    "passages": 40,
    "batch_size": 39,
}
ORDERS = 1000
#: A choice is good if the divergence is at most this share above the best.
NEAR = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--name", default="embedded", help="of the model in the results")
    parser.add_argument("--memory", default="128KiB")
    parser.add_argument("--length", type=int, default=256, help="tokens per passage")
    parser.add_argument("--task-file", type=Path, help="prompts instead of the held-out texts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("results/recommend_grid"), help="folder of the rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    given: dict[str, Any] = {**GRID, "model": options.model, "memory": options.memory, "length": options.length}
    if options.task_file:
        given |= {"task_file": options.task_file}
        del given["answer_tokens"], given["length"]
    work = options.work / options.name
    run_recommend(RecommendOptions(**given, share=1.0, output=work / "grid"))
    chosen = run_recommend(RecommendOptions(**given, output=work / "search"))
    found = {"settings": {**given, "model": options.name}, "threads": options.threads} | compare(
        work, options.memory, next(iter(chosen.values())).candidate
    )
    save(options.name, found)
    print(json.dumps(found, indent=2))


def compare(work: Path, size: str, choice: str) -> dict[str, Any]:
    """What the search chose beside the full grid."""
    table, names, passages = grid_of(work / "grid" / "results.jsonl")
    means = {name: fmean(table[name]) for name in names}
    order = sorted(names, key=lambda name: means[name])
    took = {kind: json.loads((work / kind / SUMMARY).read_text("utf-8"))["cost"] for kind in ("grid", "search")}
    rounds = plan(len(names), passages, RecommendOptions.model_fields["share"].default)
    return {
        "candidates": len(names),
        "passages": passages,
        "rounds": [[each.candidates, each.passages] for each in rounds],
        "best": {"candidate": order[0], "divergence": means[order[0]]},
        "chosen": {"candidate": choice, "divergence": means[choice], "rank": order.index(choice) + 1},
        "above_the_best": means[choice] / means[order[0]] - 1,
        "tokens": {kind: each["tokens"] for kind, each in took.items()},
        "cost": took["search"]["tokens"] / took["grid"]["tokens"],
        "seconds": {kind: round(each["seconds"], 1) for kind, each in took.items()},
        "divergences": {name: round(means[name], 5) for name in order},
        "other_orders": replayed(table, passages),
        "environment": timed_on(),
    }


def grid_of(path: Path) -> tuple[dict[str, list[float]], list[str], int]:
    """Divergences by candidate and passage, of those that could be read."""
    rows = [row for _, row in read_lines([path], row_key)[0].values()]
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["candidate"] != "full" and not row["failed"]:
            found.setdefault(row["candidate"], []).append(decides(row, "both"))
    passages = len({row["passage"] for row in rows})
    found = {name: values for name, values in found.items() if len(values) == passages}
    return found, list(found), passages


def replayed(table: dict[str, list[float]], passages: int, share: float = 0.1) -> dict[str, Any]:
    """The search on the rows of the grid, with its passages in `ORDERS` other orders."""
    means = {name: fmean(values) for name, values in table.items()}
    best, rounds, rng = min(means.values()), plan(len(table), passages, share), random.Random(0)
    above = []
    for _ in range(ORDERS):
        order = rng.sample(range(passages), passages)
        above.append(means[search(table, order, rounds)] / best - 1)
    return {
        "orders": ORDERS,
        "readings": cost(rounds) / cost(plan(len(table), passages, 1.0)),
        "within_2_percent": sum(each <= NEAR for each in above) / ORDERS,
        "mean_above": fmean(above),
        "worst_above": max(above),
    }


def search(table: dict[str, list[float]], order: Sequence[int], rounds: Sequence[Any]) -> str:
    left = list(table)
    for index, each in enumerate(rounds):
        read = {name: [table[name][at] for at in order[: each.passages]] for name in left}
        left = survivors(read, rounds[index + 1].candidates if index + 1 < len(rounds) else 1)
    return left[0]


def save(name: str, found: dict[str, Any]) -> None:
    path = RESULTS / "recommend.json"
    all_found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**all_found, name: found}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()

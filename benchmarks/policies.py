"""Every policy on the embedded model: how right its answers are.

`python benchmarks/policies.py --workers 2` answers the tasks of the suite at four budgets and block sizes, with the
question known when the prompt is compressed and without. Rows are written as they are finished, a folder per block
size, mode and seed; the same command continues, and adds the policies and seeds that were not there before. The results
are those of all seeds together; they go into `benchmarks/results/policies.json`, and `make docs-pages` shows them.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from common import RESULTS, timed_on

from hf_paged_eviction import available_policies
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval.caches.budgets import FULL
from hf_paged_eviction_eval.caches.policy_names import needs_queries
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.settings import EMBEDDED, TaskSettings
from hf_paged_eviction_eval.report.frame import long_frame
from hf_paged_eviction_eval.report.means import CELL, Mean, cells_of
from hf_paged_eviction_eval.running.evaluation import evaluate
from hf_paged_eviction_eval.running.requests import Request
from hf_paged_eviction_eval.store.checks import row_key
from hf_paged_eviction_eval.store.results import Row, read_folder
from hf_paged_eviction_eval.tasks import TASK_GROUPS

#: Policies around policies, and budgets shared out among layers and heads.
COMPOSED = (
    *(f"caote({policy})" for policy in ("h2o", "tova", "snapkv")),
    *(f"graphkv({policy})" for policy in ("paged_eviction", "keydiff", "h2o")),
    "hybrid(snapkv, keydiff)",
    "hybrid(h2o, recency)",
    "adaptive(keydiff, h2o)",
    *(f"keydiff@{name}" for name in ("pyramid", "cake", "d2o", "ada_kv")),
    *(f"snapkv@{name}" for name in ("pyramid", "cake", "ada_kv")),
    "cake@cake",
    "kvzip@ada_kv",
)
RANDOM, ALL_TASKS = "random", "all tasks"
TARGET = RESULTS / "policies.json"
BUDGETS = ("6%", "12.5%", "25%", "50%")


def main() -> None:
    options = arguments()
    every = options.policies.split(";") if options.policies else [*available_policies(), *COMPOSED]
    wanted = tuple(dict.fromkeys([RANDOM, *filter(can_be_made, every)]))
    try:
        for runs in grid(options):
            for settings, name in runs:
                print(name, flush=True)
                run = Request(settings.but(policies=wanted), options.work / name, EvalOptions(workers=options.workers))
                evaluate(run, lambda _: None)
    except UserError as error:
        raise SystemExit(str(error)) from error
    TARGET.write_text(compact(collect(options)) + "\n")


def can_be_made(policy: str) -> bool:
    """Whether a policy needs nothing but its name."""
    try:
        needs_queries(policy)
    except (TypeError, ValueError) as error:
        print(f"left out: {policy} ({error})")
        return False
    return True


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("results/policies"), help="folder of the rows")
    parser.add_argument("--workers", type=int, help="processes, with a thread each (default: 2)")
    parser.add_argument("--samples", type=int, default=32, help="prompts per task")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--blocks", default="1,8,16,32")
    parser.add_argument("--modes", default="aware,agnostic", help="whether the question is in what is compressed")
    parser.add_argument("--seeds", default="0,1", help="which prompts are drawn; those of all seeds count")
    parser.add_argument("--policies", help="instead of all of them, with ; in between")
    return parser.parse_args(words)


def grid(options: argparse.Namespace) -> Iterator[list[tuple[TaskSettings, str]]]:
    """For each block size and mode the settings of each seed, without policies, and a name for them."""
    for mode, block in product(options.modes.split(","), map(int, options.blocks.split(","))):
        first = TaskSettings(
            policies=(),
            budgets=(*BUDGETS, FULL),
            profile=EMBEDDED,
            block_size=block,
            tasks=TASK_GROUPS["suite"],
            lengths=(options.length,),
            question_aware=mode == "aware",
            limit=options.samples,
            batch_size=options.batch_size,
            attn_implementation=PAGED_EVICTION,
        )
        seeds = map(int, options.seeds.split(","))
        yield [(first.but(seed=seed), f"{mode}-block{block}" + f"-seed{seed}" * bool(seed)) for seed in seeds]


# ---- results ----------------------------------------------------------------------------------------------------


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is in the work folder."""
    usual = arguments([])
    names = ("samples", "length", "blocks", "modes", "seeds", "policies")
    changed = [f"--{name} {getattr(options, name)}" for name in names if getattr(options, name) != getattr(usual, name)]
    runs = []
    for seeds in grid(options):
        rows = [row for _, name in seeds for row in read_folder(options.work / name, row_key)[0].values()]
        if rows:
            runs.append(summary(seeds[0][0], rows))
    return {
        "environment": timed_on(),
        "command": " ".join(["python benchmarks/policies.py", *changed]),
        "model": "embedded",
        "seeds": list(map(int, options.seeds.split(","))),
        "length": options.length,
        "tasks": [*TASK_GROUPS["suite"], ALL_TASKS],
        "columns": "per policy: mean score and its standard error per task and of all tasks, from 0 to 1",
        "runs": runs,
    }


def summary(settings: TaskSettings, rows: Sequence[Row]) -> dict[str, Any]:
    """One block size and mode, all seeds together."""
    frame = long_frame(rows)
    cells = list(cells_of(frame).itertuples())
    every = cells_of(frame.assign(every=ALL_TASKS), ["every", *CELL[1:]], ["task"]).rename(columns={"every": "task"})
    scores = {(cell.task, cell.policy, cell.budget): cell.score for cell in [*cells, *every.itertuples()]}
    budgets: dict[str, dict[str, list[float | None]]] = {}
    for cell in cells:
        means = [scores.get((task, cell.policy, cell.budget)) for task in (*settings.tasks, ALL_TASKS)]
        budgets.setdefault(cell.budget, {})[cell.policy] = [number for mean in means for number in _numbers(mean)]
    return {
        "question_aware": settings.question_aware,
        "block_size": settings.block_size,
        "samples": max(cell.samples for cell in cells),
        "tokens": {cell.budget: cell.tokens for cell in cells if cell.budget != FULL},
        "budgets": budgets,
    }


def _numbers(mean: Mean | None) -> list[float | None]:
    """A mean and its error, from 0 to 1."""
    numbers = (None, None) if mean is None else (mean.value, mean.error)
    return [None if number is None else round(number / 100, 4) for number in numbers]


def compact(content: Any) -> str:
    """JSON with a line per list of numbers or names."""
    lists = re.compile(r"\[\s*([^][{}]*?)\s*\]")
    return lists.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(content, indent=1))


if __name__ == "__main__":
    main()

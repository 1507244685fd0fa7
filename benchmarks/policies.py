"""Every policy on the embedded model, as a share of the way from random eviction to the oracle.

`python benchmarks/policies.py --workers 2` answers the tasks of the suite at four budgets and block sizes, with the
question known when the prompt is compressed and without. Rows are written as they are finished, a folder per block
size, mode and seed; the same command continues, and adds the policies and seeds that were not there before. The results
are those of all seeds together, with the shares of each seed beside them. `--quick` takes minutes.

`--onto` adds the policies of `--policies` to the results there are, which must be of the same prompts: random eviction
and the oracle are measured again, and have to come to the same.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from common import RESULTS
from policies_plot import plot_shares
from regret import ALL_TASKS, RANDOM, Share, shares

from hf_paged_eviction import available_policies
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval.caches.budgets import FULL, ORACLE
from hf_paged_eviction_eval.caches.policy_names import needs_queries
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.models.environment import timed_on
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.evaluation import evaluate_tasks
from hf_paged_eviction_eval.running.variants import row_key
from hf_paged_eviction_eval.store.completion import Progress
from hf_paged_eviction_eval.store.results import Row, read_rows
from hf_paged_eviction_eval.store.summaries.summary import Cell, over_tasks, summarise
from hf_paged_eviction_eval.tasks import TASK_GROUPS

#: Policies with a file, policies around policies, and budgets shared out among layers and heads.
COMPOSED = (
    "calibrated:embedded",
    "caote(h2o)",
    "caote(tova)",
    "caote(snapkv)",
    "graphkv(paged_eviction)",
    "graphkv(keydiff)",
    "graphkv(h2o)",
    "hybrid(snapkv, keydiff)",
    "hybrid(h2o, recency)",
    "adaptive(keydiff, h2o)",
    *(f"{policy}@{name}" for policy in (ORACLE, "keydiff") for name in ("pyramid", "cake", "d2o", "ada_kv")),
    *(f"snapkv@{name}" for name in ("pyramid", "cake", "ada_kv")),
    "cake@cake",
    "kvzip@ada_kv",
)
IMAGE = Path(__file__).parents[1] / "notebooks" / "images" / "policies.png"


def main() -> None:
    options = arguments()
    every = options.policies.split(";") if options.policies else [*available_policies(), *COMPOSED]
    wanted = [name for name in every if can_be_made(name)]
    wanted = list(dict.fromkeys([RANDOM, ORACLE, *wanted]))
    try:
        for runs in grid(options):
            for settings, name in runs:
                evaluate_tasks(
                    settings.but(policies=tuple(wanted)), options.work / name, options.workers, Printer(name)
                )
    except UserError as error:
        raise SystemExit(str(error)) from error
    if options.onto:
        add(options, RESULTS / "policies.json", IMAGE)
    elif options.quick:
        collect(options, options.work / "policies.json", options.work / "policies.png")
    else:
        collect(options, RESULTS / "policies.json", IMAGE)


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
    parser.add_argument("--quick", action="store_true", help="two tasks, few short prompts, one block size")
    parser.add_argument("--work", type=Path, help="folder of the rows (default: results/policies)")
    parser.add_argument("--workers", type=int, help="processes, with a thread each (default: 2)")
    parser.add_argument("--samples", type=int, default=32, help="prompts per task")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--blocks", default="1,8,16,32")
    parser.add_argument("--modes", default="aware,agnostic", help="whether the question is in what is compressed")
    parser.add_argument("--seeds", default="0,1", help="which prompts are drawn; those of all seeds count")
    parser.add_argument("--policies", help="instead of all of them, with ; in between")
    parser.add_argument("--onto", action="store_true", help="add to the results there are")
    options = parser.parse_args(words)
    options.budgets, options.tasks = ("6%", "12.5%", "25%", "50%"), TASK_GROUPS["suite"]
    if options.quick:
        options.samples, options.batch_size, options.length, options.blocks = 4, 4, 256, "8"
        options.seeds = "0"
        options.budgets, options.tasks = ("25%", "50%"), ("kv_recall_many", "span_copy")
    options.work = options.work or Path("results") / ("policies-quick" if options.quick else "policies")
    return options


def grid(options: argparse.Namespace) -> Iterator[list[tuple[TaskSettings, str]]]:
    """For each block size and mode the settings of each seed, without policies, and a name for them."""
    for mode, block in product(options.modes.split(","), map(int, options.blocks.split(","))):
        first = TaskSettings(
            policies=(),
            budgets=(*options.budgets, FULL),
            block_size=block,
            tasks=options.tasks,
            lengths=(options.length,),
            question_aware=mode == "aware",
            limit=options.samples,
            batch_size=options.batch_size,
            attn_implementation=PAGED_EVICTION,
        )
        seeds = list(map(int, options.seeds.split(",")))
        yield [(first.but(seed=seed), f"{mode}-block{block}" + f"-seed{seed}" * bool(seed)) for seed in seeds]


class Printer:
    """Progress, a line per twentieth."""

    def __init__(self, name: str) -> None:
        self.name, self.last = name, -1

    def __call__(self, progress: Progress) -> None:
        step = 20 * progress.finished // max(progress.total, 1)
        if step != self.last:
            self.last = step
            print(f"{self.name}: {progress.finished} of {progress.total} rows {progress.last}", flush=True)


# ---- results ----------------------------------------------------------------------------------------------------


def collect(options: argparse.Namespace, target: Path, image: Path) -> None:
    """Everything that is in the work folder, as one file and one plot."""
    runs = summaries(options)
    content = {
        "environment": timed_on(),
        "command": command(options),
        "model": "embedded",
        "seeds": list(map(int, options.seeds.split(","))),
        "length": options.length,
        "tasks": [*options.tasks, ALL_TASKS],
        "columns": "per policy: share of the distance from random (0) to the oracle (1) over all tasks and its "
        "standard error, then mean score and standard error per task and of all tasks",
        "runs": runs,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(compact(content) + "\n")
    plot_shares(runs, image)
    print(f"written: {target}, {image}")


def summaries(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is in the work folder, by mode and block size."""
    runs = []
    for seeds in grid(options):
        by_seed = {settings.seed: rows_of(options.work, name) for settings, name in seeds}
        rows = [row for each in by_seed.values() for row in each]
        if rows:
            runs.append(summary(seeds[0][0], rows) | ({"by_seed": seed_shares(by_seed)} if len(by_seed) > 1 else {}))
    return runs


def add(options: argparse.Namespace, target: Path, image: Path) -> None:
    """Put the policies of the work folder into results of the same prompts."""
    content = json.loads(target.read_text("utf-8"))
    known = {(run["question_aware"], run["block_size"]): run for run in content["runs"]}
    for run in summaries(options):
        old = known.get((run["question_aware"], run["block_size"]))
        if old is None:
            raise SystemExit(f"{target} has no run with blocks of {run['block_size']}")
        for budget, lines in run["budgets"].items():
            if budget != FULL:
                _put(old["budgets"][budget], lines, f"{budget} of {old['block_size']}")
        for seed, budgets in run.get("by_seed", {}).items():
            for budget, lines in budgets.items():
                old["by_seed"][seed][budget] |= lines
    target.write_text(compact(content) + "\n")
    plot_shares(content["runs"], image)
    print(f"added to: {target}, {image}")


def _put(old: dict[str, list[float | None]], new: dict[str, list[float | None]], where: str) -> None:
    """Add lines to those of a budget, if what both have says that they are of the same prompts."""
    for name in (RANDOM, ORACLE):
        if old[name] != new[name]:
            raise SystemExit(f"budget {where}: {name} has {new[name]} now and had {old[name]}: other prompts or code")
    old |= {name: line for name, line in new.items() if name not in (RANDOM, ORACLE)}


def command(options: argparse.Namespace) -> str:
    """What gives these results, without what does not change them."""
    usual = arguments([])
    names = ("samples", "length", "blocks", "modes", "seeds", "policies")
    asked = [f"--{name} {getattr(options, name)}" for name in names if getattr(options, name) != getattr(usual, name)]
    return " ".join(["python benchmarks/policies.py", *(["--quick"] if options.quick else asked)])


def rows_of(work: Path, name: str) -> list[Row]:
    """All rows of one block size, mode and seed."""
    return read_rows(work / name, row_key)[0]


def seed_shares(rows: dict[int, list[Row]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Seed -> budget -> policy -> share over all tasks."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for seed, own in rows.items():
        for each in shares(own):
            if each.task == ALL_TASKS:
                share = None if each.share is None else round(each.share, 4)
                found.setdefault(str(seed), {}).setdefault(each.budget, {})[each.policy] = share
    return found


def summary(settings: TaskSettings, rows: Sequence[Row]) -> dict[str, Any]:
    """One block size and mode, all seeds together."""
    cells = summarise(rows)
    means = {(cell.task, cell.policy, cell.budget): cell for cell in [*cells, *over_tasks(cells)]}
    found = {(each.policy, each.budget): each for each in shares(rows) if each.task in (ALL_TASKS, *_only(settings))}
    policies = list(dict.fromkeys(cell.policy for cell in cells))

    def lines(budget: str) -> dict[str, list[float | None]]:
        return {
            policy: _numbers(found.get((policy, budget)), [means.get((task, policy, budget)) for task in tasks])
            for policy in policies
            if any((task, policy, budget) in means for task in tasks)
        }

    tasks = [*settings.tasks, ALL_TASKS]
    return {
        "question_aware": settings.question_aware,
        "block_size": settings.block_size,
        "samples": max(cell.samples for cell in cells),
        "tokens": {cell.budget: cell.tokens for cell in cells if cell.budget != FULL},
        "budgets": {budget: lines(budget) for budget in dict.fromkeys(cell.budget for cell in cells)},
    }


def _only(settings: TaskSettings) -> tuple[str, ...]:
    return settings.tasks if len(settings.tasks) == 1 else ()


def _numbers(share: Share | None, cells: Sequence[Cell | None]) -> list[float | None]:
    numbers: list[float | None] = [None, None] if share is None else [share.share, share.error]
    for cell in cells:
        numbers += [None, None] if cell is None else [asdict(cell)["accuracy"], cell.error]
    return [None if number is None else round(number, 4) for number in numbers]


def compact(content: Any, depth: int = 0) -> str:
    """JSON with a line per list of numbers."""
    if isinstance(content, dict) and content:
        inner = ",\n".join(
            f"{' ' * (depth + 1)}{json.dumps(key)}: {compact(content[key], depth + 1)}" for key in content
        )
        return f"{{\n{inner}\n{' ' * depth}}}"
    if isinstance(content, list) and any(isinstance(item, dict) for item in content):
        inner = ",\n".join(" " * (depth + 1) + compact(item, depth + 1) for item in content)
        return f"[\n{inner}\n{' ' * depth}]"
    return json.dumps(content)


if __name__ == "__main__":
    main()

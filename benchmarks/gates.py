"""What gates are worth on the embedded model: `python benchmarks/gates.py --help`.

The tasks of the suite and the perplexity of held-out text, next to the scores that were fitted without hidden states
and to the oracle. Prompts are of seeds by which nothing was chosen. Differences are of the same prompts. Rows are
written as they are finished; the same command continues.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from common import save
from recent_tokens import ratio, stretches

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.evaluation import evaluate_tasks
from hf_paged_eviction_eval.gating import install_named
from hf_paged_eviction_eval.perplexity import token_losses
from hf_paged_eviction_eval.running.variants import row_key
from hf_paged_eviction_eval.settings import TaskSettings
from hf_paged_eviction_eval.store.results import Row, read_rows
from hf_paged_eviction_eval.tasks import TASK_GROUPS

GATE, CALIBRATED, ORACLE = "gate:embedded", "calibrated:embedded", "oracle"
POLICIES = (ORACLE, CALIBRATED, "self_calibrated", GATE)
#: Of the suite, the tasks with an answer that is right or wrong.
TASKS = tuple(task for task in TASK_GROUPS["suite"] if task != "next_line")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("results") / "gates", help="folder of the rows")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="prompts per task and seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--budgets", nargs="+", default=["6%", "12.5%"])
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--text-budgets", type=int, nargs="+", default=[128, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for known in (False, True) for row in tasks(options, known)]
    save("gates", {"tasks": rows, "perplexity": perplexities(options), "settings": settings(options)})


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers are of."""
    return {
        "model": "embedded",
        "block_size": 16,
        "length": options.length,
        "samples": options.samples,
        "seeds": options.seeds,
        "tasks": list(TASKS),
        "texts": options.texts,
    }


def tasks(options: argparse.Namespace, known: bool) -> list[dict[str, Any]]:
    """A row per policy and budget."""
    found: list[Row] = []
    for seed in options.seeds:
        path = options.work / f"{'known' if known else 'unknown'}-seed{seed}"
        asked = TaskSettings(
            policies=POLICIES,
            budgets=tuple(options.budgets),
            block_size=16,
            tasks=TASKS,
            lengths=(options.length,),
            question_aware=known,
            limit=options.samples,
            batch_size=16,
            seed=seed,
            attn_implementation=PAGED_EVICTION,
        )
        evaluate_tasks(asked, path, options.workers, lambda progress: None)
        found += read_rows(path, row_key)[0]
    return [_row(found, known, policy, budget) for budget in options.budgets for policy in POLICIES]


def _row(rows: Sequence[Row], known: bool, policy: str, budget: str) -> dict[str, Any]:
    scores = {
        name: {row["id"]: row["score"] for row in rows if _is(row, name, budget)} for name in (policy, CALIBRATED)
    }
    own, other = scores[policy], scores[CALIBRATED]
    by_task = {task: fmean(score for name, score in own.items() if name.startswith(f"{task}/")) for task in TASKS}
    differences = [own[key] - other[key] for key in own]
    return {
        "question": "known" if known else "unknown",
        "policy": policy,
        "budget": budget,
        "score": round(fmean(by_task.values()), 4),
        "error": round(_error(list(own.values())), 4),
        "over_calibrated": round(fmean(differences), 4),
        "over_calibrated_error": round(_error(differences), 4),
        "tasks": {task: round(score, 4) for task, score in by_task.items()},
    }


def _is(row: Row, policy: str, budget: str) -> bool:
    return bool(row["policy"] == policy and row["budget"] == budget)


def _error(numbers: Sequence[float]) -> float:
    return stdev(numbers) / len(numbers) ** 0.5


@torch.inference_mode()
def perplexities(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per policy and budget: of held-out modules, read in chunks of 64, after the first eviction."""
    model, tokenizer = embedded.load()
    install_named(model, [GATE])
    model.set_attn_implementation(PAGED_EVICTION)
    ids = stretches(tokenizer, 1536)[: options.texts]
    found = []
    for budget in options.text_budgets:
        first = None
        for policy in (CALIBRATED, "self_calibrated", GATE, "recency"):
            cache = PagedEvictionCache(model.config, budget=budget, policy=policy, attention_mask=torch.ones_like(ids))
            own = token_losses(model, ids, cache, 64)[:, budget:].double().mean(1)
            first = own if first is None else first
            found.append(
                {
                    "policy": policy,
                    "budget": budget,
                    "perplexity": round(own.mean().exp().item(), 3),
                    **{f"{name}_to_calibrated": value for name, value in ratio(own - first).items()},
                }
            )
    return found


if __name__ == "__main__":
    main()

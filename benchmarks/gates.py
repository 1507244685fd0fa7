"""What gates are worth: `python benchmarks/gates.py --help`.

The tasks of the suite and the perplexity of held-out text, next to the scores that were fitted without hidden states
and to the oracle. Prompts are of seeds by which nothing was chosen. Differences are of the same prompts. Rows are
written as they are finished; the same command continues.

A model that is not the embedded one (`python -m training.second`): a calibration and a gate are fitted to it first, by
`paged-eviction calibrate` and `paged-eviction fit-gate` as they are, on texts of the length of its prompts, with
questions and answers, of a seed of their own:

    python benchmarks/gates.py --model FOLDER --name second --length 112 --budgets 32 --tasks kv_recall few_shot
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from common import RESULTS
from recent_tokens import ratio, stretches

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import models
from hf_paged_eviction_eval.calibrate import SHORTEST
from hf_paged_eviction_eval.commands import app
from hf_paged_eviction_eval.environment import timed_on
from hf_paged_eviction_eval.evaluation import evaluate_tasks
from hf_paged_eviction_eval.gating import install_named
from hf_paged_eviction_eval.perplexity import token_losses
from hf_paged_eviction_eval.running.variants import row_key
from hf_paged_eviction_eval.settings import TaskSettings
from hf_paged_eviction_eval.store.results import Row, read_rows
from hf_paged_eviction_eval.tasks import TASK_GROUPS
from training.corpus import Corpus

EMBEDDED, ORACLE = "embedded", "oracle"
#: Of the suite, the tasks with an answer that is right or wrong.
TASKS = tuple(task for task in TASK_GROUPS["suite"] if task != "next_line")
#: The texts that gates are fitted to: their seed, how many there are, and facts in each at most.
_SEED, _TEXTS, _LOAD = 3000, 320, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED, help="folder of a model")
    parser.add_argument("--name", default=EMBEDDED, help="of the model in the results")
    parser.add_argument("--work", type=Path, default=Path("results") / "gates", help="folder of the rows")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="prompts per task and seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--budgets", nargs="+", default=["6%", "12.5%"])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--straight-through", metavar="FILE", help="gates of fit-gate --loss straight_through, too")
    parser.add_argument("--texts", type=int, default=12, help="for perplexity; 0 = none")
    parser.add_argument("--text-budgets", type=int, nargs="+", default=[128, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work = options.work / options.name
    options.work.mkdir(parents=True, exist_ok=True)
    options.files = (EMBEDDED, EMBEDDED) if options.model == EMBEDDED else fitted(options)
    rows = [row for known in (False, True) for row in tasks(options, known)]
    found = {"tasks": rows, "perplexity": perplexities(options), "settings": settings(options)}
    write(options.name, found | {"command": command(parser, options), "environment": timed_on()})


def command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """What gives these results, without what does not change them."""
    said = ["python benchmarks/gates.py"]
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.dest in ("help", "work", "workers") or value == action.default:
            continue
        shown = {"model": "FOLDER", "straight_through": "FILE"}.get(action.dest)
        words = shown or (" ".join(map(str, value)) if isinstance(value, list) else str(value))
        said.append(f"{action.option_strings[0]} {words}")
    return " ".join(said)


def write(name: str, found: dict[str, Any]) -> None:
    """Put what was found on one model into the results, beside the others."""
    path = RESULTS / "gates.json"
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(known | {name: found}, indent=2) + "\n", "utf-8")
    print(f"written: {path}")


def fitted(options: argparse.Namespace) -> tuple[str, str]:
    """A calibration and a gate of this model, by the commands that users have, nothing chosen."""
    texts, files = options.work / "texts.jsonl", {}
    if not texts.exists():
        write_texts(models.load_tokenizer(asked(options)), texts, options.length)
    for command in ("calibrate", "fit-gate"):
        files[command] = str(options.work / f"{command}.safetensors")
        if not Path(files[command]).exists():
            said = [command, "--model", options.model, "--text", str(texts), "--output", files[command]]
            app(said, standalone_mode=False)
    return files["calibrate"], files["fit-gate"]


def write_texts(tokenizer: Any, path: Path, length: int) -> None:
    """Prompts with questions and answers, some behind each other where one alone is too short to learn from."""
    corpus = Corpus(tokenizer, _SEED)
    many = -(-SHORTEST * 11 // (10 * length))
    with path.open("w", encoding="utf-8") as file:
        for _ in range(_TEXTS):
            ids = [token for _ in range(many) for token in corpus.questions(length, _LOAD).ids]
            file.write(json.dumps({"text": tokenizer.decode(ids)}) + "\n")


def policies(options: argparse.Namespace) -> dict[str, str]:
    """What is compared, the calibration second, and how the results call it."""
    calibration, gate = options.files
    shown = EMBEDDED if options.model == EMBEDDED else "FILE"
    found = {ORACLE: ORACLE, f"calibrated:{calibration}": f"calibrated:{shown}", "self_calibrated": "self_calibrated"}
    found[f"gate:{gate}"] = f"gate:{shown}"
    if options.straight_through:
        found[f"gate:{options.straight_through}"] = "gate, straight_through"
    return found


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers are of."""
    names = ("block_size", "length", "samples", "seeds", "tasks", "texts")
    return {"model": options.name, **{name: getattr(options, name) for name in names}}


def asked(
    options: argparse.Namespace, policies: tuple[str, ...] = (), known: bool = False, seed: int = 0
) -> TaskSettings:
    """A run of the harness."""
    return TaskSettings(
        model=options.model,
        policies=policies,
        budgets=tuple(options.budgets),
        block_size=options.block_size,
        tasks=tuple(options.tasks),
        lengths=(options.length,),
        question_aware=known,
        limit=options.samples,
        batch_size=16,
        seed=seed,
        attn_implementation=PAGED_EVICTION,
    )


def tasks(options: argparse.Namespace, known: bool) -> list[dict[str, Any]]:
    """A row per policy and budget."""
    found: list[Row] = []
    names = policies(options)
    for seed in options.seeds:
        path = options.work / f"{'known' if known else 'unknown'}-seed{seed}"
        evaluate_tasks(asked(options, tuple(names), known, seed), path, options.workers, lambda progress: None)
        found += read_rows(path, row_key)[0]
    scores = {
        (policy, budget): {row["id"]: row["score"] for row in found if _is(row, policy, budget)}
        for policy in names
        for budget in options.budgets
    }
    calibrated = list(names)[1]
    return [
        {"question": "known" if known else "unknown", "policy": names[policy], "budget": budget}
        | _numbers(scores[policy, budget], scores[calibrated, budget], options.tasks)
        for budget in options.budgets
        for policy in names
    ]


def _numbers(own: dict[str, float], calibrated: dict[str, float], tasks: Sequence[str]) -> dict[str, Any]:
    by_task = {task: fmean(score for name, score in own.items() if name.startswith(f"{task}/")) for task in tasks}
    differences = [own[key] - calibrated[key] for key in own]
    return {
        "score": round(fmean(by_task.values()), 4),
        "error": round(_error(list(own.values())), 4),
        "over_calibrated": round(fmean(differences), 4),
        "over_calibrated_error": round(_error(differences), 4),
        "tasks": {task: round(score, 4) for task, score in by_task.items()},
    }


def _is(row: Row, policy: str, budget: str) -> bool:
    return bool(row["policy"] == policy and row["budget"] == budget)


def _error(numbers: Sequence[float]) -> float:
    return float(stdev(numbers) / len(numbers) ** 0.5)


@torch.inference_mode()
def perplexities(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per policy and budget: of held-out modules, read in chunks of 64, after the first eviction."""
    if not options.texts:
        return []
    model, tokenizer = models.load(asked(options))
    names = policies(options)
    compared = {policy: names[policy] for policy in list(names)[1:]} | {"recency": "recency"}
    install_named(model, compared)
    model.set_attn_implementation(PAGED_EVICTION)
    ids = stretches(tokenizer, 1536)[: options.texts]
    found = []
    for budget in options.text_budgets:
        first = None
        for policy, name in compared.items():
            cache = PagedEvictionCache(model.config, budget=budget, policy=policy, attention_mask=torch.ones_like(ids))
            own = token_losses(model, ids, cache, 64)[:, budget:].double().mean(1)
            first = own if first is None else first
            found.append(
                {
                    "policy": name,
                    "budget": budget,
                    "perplexity": round(own.mean().exp().item(), 3),
                    **{f"{key}_to_calibrated": value for key, value in ratio(own - first).items()},
                }
            )
    return found


if __name__ == "__main__":
    main()

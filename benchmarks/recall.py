"""What recall is worth on the embedded model, and what a step costs: `python benchmarks/recall.py --help`.

Accuracy: prompts of one length, greedy answers, dropping with keydiff beside recall. "unknown": the context is read
first and the question comes as a second turn; "known": both at once. Device bytes are those of keys, values and
summaries after the answer, as a share of the full cache's.

Time: one decode step of the embedded model behind a long text, every variant in turn.
"""

import argparse
import json
from functools import partial
from statistics import median
from typing import Any

import torch
from common import RESULTS, interleaved, save
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import get_task, make_samples

TASKS = ("kv_recall", "kv_recall_many", "variable_tracking", "few_shot", "span_copy")


def variants(length: int) -> dict[str, dict[str, Any]]:
    """By name, the arguments of the cache."""
    sixteenth = length // 16
    drop = {f"drop {part}/16": {"budget": part * sixteenth} for part in (1, 2, 3, 4)}
    recall = {
        f"{name} {part}/16": {"budget": part * sixteenth, "disposal": text, "heads": heads}
        for part in (1, 2)
        for name, text, heads in (
            ("recall", "recall(blocks={})", "shared"),
            ("recall, vector", "recall(blocks={}, summary=vector)", "shared"),
            ("recall, separate", "recall(blocks={})", "separate"),
        )
    }
    for settings in recall.values():
        settings["disposal"] = settings["disposal"].format(settings["budget"] // 16 - 3)
    return {"full": {}, **drop, **recall}


def make_cache(model: Any, settings: dict[str, Any]) -> DynamicCache:
    if not settings:
        return DynamicCache(config=model.config)
    return PagedEvictionCache(model.config, **{"policy": "keydiff", **settings})


def device_bytes(cache: DynamicCache) -> int:
    if isinstance(cache, PagedEvictionCache):
        stats = cache.stats()
        return stats.storage_bytes + stats.summary_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.inference_mode()
def answer(model: Any, turns: list[Tensor], cache: DynamicCache, count: int) -> list[int]:
    """Greedy tokens after the turns `[1, n]`."""
    for turn in turns:
        logits = model(input_ids=turn, past_key_values=cache, use_cache=True).logits
    said: list[int] = []
    while len(said) < count:
        said.append(int(logits[0, -1].argmax()))
        logits = model(input_ids=torch.tensor([said[-1:]]), past_key_values=cache, use_cache=True).logits
    return said


def accuracy(model: Any, tokenizer: Any, length: int, count: int, seed: int) -> dict[str, dict[str, float]]:
    """Mean scores of each variant, by task."""
    scores: dict[str, dict[str, list[float]]] = {}
    for task in TASKS:
        for sample in make_samples(task, tokenizer, length, count, seed):
            context = tokenizer(sample.context, return_tensors="pt")["input_ids"]
            whole = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
            question = whole[:, context.shape[1] :]
            for name, settings in variants(length).items():
                for known, turns in (("unknown", [context, question]), ("known", [whole])):
                    cache = make_cache(model, settings)
                    text = tokenizer.decode(answer(model, turns, cache, sample.max_new_tokens))
                    value = get_task(task).score(sample, text)
                    scores.setdefault(f"{name}, {known}", {}).setdefault(task, []).append(value)
        print(length, task, {name: round(sum(of[task]) / count, 2) for name, of in scores.items()}, flush=True)
    return {name: {task: sum(values) / count for task, values in of.items()} for name, of in scores.items()}


def device_shares(model: Any, tokenizer: Any, length: int) -> dict[str, float]:
    """Device bytes after the answer, as a share of the full cache's; of the first prompt."""
    sample = make_samples(TASKS[0], tokenizer, length, 1, 0)[0]
    whole = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
    used = {}
    for name, settings in variants(length).items():
        cache = make_cache(model, settings)
        answer(model, [whole], cache, sample.max_new_tokens)
        used[name] = device_bytes(cache)
    return {name: count / used["full"] for name, count in used.items()}


def by_policy(model: Any, tokenizer: Any, length: int, count: int, seed: int) -> dict[str, dict[str, float]]:
    """Mean scores at the same device bytes under policies that keep other tokens; the question is unknown."""
    ways = {
        "drop": {"budget": 3 * length // 16},
        "recall": {"budget": length // 8, "disposal": f"recall(blocks={length // 128 - 3})"},
    }
    found: dict[str, dict[str, float]] = {}
    for policy in ("keydiff", "paged_eviction", "recency", "random"):
        for name, settings in ways.items():
            for task in TASKS:
                scores = []
                for sample in make_samples(task, tokenizer, length, count, seed):
                    context = tokenizer(sample.context, return_tensors="pt")["input_ids"]
                    whole = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
                    cache = make_cache(model, {**settings, "policy": policy})
                    said = answer(model, [context, whole[:, context.shape[1] :]], cache, sample.max_new_tokens)
                    scores.append(get_task(task).score(sample, tokenizer.decode(said)))
                found.setdefault(f"{policy}, {name}", {})[task] = sum(scores) / count
            print(policy, name, found[f"{policy}, {name}"], flush=True)
    return found


@torch.inference_mode()
def step_time(model: Any, length: int, rounds: int, steps: int = 8) -> dict[str, float]:
    """Milliseconds of a decode step behind `length` tokens."""
    budget = max(length // 16, 128)
    blocks = min(16, budget // 16 - 3)
    settings: dict[str, dict[str, Any]] = {
        "full": {},
        "drop": {"budget": budget},
        "recall": {"budget": budget, "disposal": f"recall(blocks={blocks})"},
        "recall, every 16": {"budget": budget, "disposal": f"recall(blocks={blocks}, every=16)"},
        "recall, all": {"budget": budget, "disposal": "recall(blocks=all)"},
    }
    text = torch.randint(5, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))

    def decode(cache: DynamicCache) -> None:
        for _ in range(steps):
            token = torch.randint(5, model.config.vocab_size, (1, 1))
            model(input_ids=token, past_key_values=cache, use_cache=True)

    runs = {}
    for name, each in settings.items():
        cache = make_cache(model, each)
        for start in range(0, length, 1024):
            model(input_ids=text[:, start : start + 1024], past_key_values=cache, use_cache=True, logits_to_keep=1)
        runs[name] = partial(decode, cache)
    times = interleaved(runs, rounds)
    return {name: 1e3 * median(values) / steps for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048], help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=12, help="prompts per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--times", type=int, nargs="*", default=[1024, 8192], help="tokens behind which a step is timed"
    )
    parser.add_argument("--by-policy", type=int, default=8, help="prompts per task and policy")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation="paged_eviction")
    # What is not measured now stays as it was measured before.
    path = RESULTS / "recall.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    found, steps = before.get("accuracy", {}), before.get("step_ms", {})
    for length in options.lengths:
        shares = device_shares(model, tokenizer, length)
        scores = found.get(str(length), {})
        if options.count:
            scores = {"count": options.count, "scores": accuracy(model, tokenizer, length, options.count, options.seed)}
        found[str(length)] = {**scores, "device_share": shares}
    policies = before.get("by_policy", {})
    if options.by_policy:
        scores = by_policy(model, tokenizer, 1024, options.by_policy, options.seed)
        policies = {"count": options.by_policy, "scores": scores}
    for length in options.times:
        steps[str(length)] = step_time(model, length, options.rounds)
        print(length, {name: f"{value:.2f} ms" for name, value in steps[str(length)].items()})
    save("recall", {"accuracy": found, "by_policy": policies, "step_ms": steps})


if __name__ == "__main__":
    main()

"""What recall is worth on the embedded model, and what a step costs: `python benchmarks/recall.py --help`.

Accuracy: prompts of one length, greedy answers, dropping with keydiff beside recall. "unknown": the context is read
first and the question comes as a second turn; "known": both at once. Device bytes are those of keys, values and
summaries after the answer, as a share of the full cache's.

Time: one decode step of the embedded model behind a long text, every variant in turn.
"""

import argparse
from functools import partial
from statistics import median
from typing import Any

import torch
from common import interleaved, save
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
    return PagedEvictionCache(model.config, policy="keydiff", **settings)


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


def accuracy(model: Any, tokenizer: Any, length: int, count: int, seed: int) -> dict[str, Any]:
    """Mean scores and device bytes of each variant."""
    scores: dict[str, dict[str, list[float]]] = {}
    share: dict[str, list[float]] = {}
    for task in TASKS:
        for sample in make_samples(task, tokenizer, length, count, seed):
            context = tokenizer(sample.context, return_tensors="pt")["input_ids"]
            whole = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
            question = whole[:, context.shape[1] :]
            full = 0
            for name, settings in variants(length).items():
                for known, turns in (("unknown", [context, question]), ("known", [whole])):
                    cache = make_cache(model, settings)
                    text = tokenizer.decode(answer(model, turns, cache, sample.max_new_tokens))
                    value = get_task(task).score(sample, text)
                    scores.setdefault(f"{name}, {known}", {}).setdefault(task, []).append(value)
                    full = full or device_bytes(cache)
                    share.setdefault(name, []).append(device_bytes(cache) / full)
        print(task, {name: round(sum(of[task]) / count, 2) for name, of in scores.items()}, flush=True)
    means = {name: {task: sum(values) / count for task, values in of.items()} for name, of in scores.items()}
    return {"scores": means, "device_share": {name: sum(values) / len(values) for name, values in share.items()}}


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
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=12, help="prompts per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--times", type=int, nargs="*", default=[1024, 8192], help="tokens behind which a step is timed"
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation="paged_eviction")
    results = accuracy(model, tokenizer, options.length, options.count, options.seed) if options.count else {}
    steps = {str(length): step_time(model, length, options.rounds) for length in options.times}
    for length, times in steps.items():
        print(length, {name: f"{value:.2f} ms" for name, value in times.items()})
    save("recall", {"settings": vars(options), **results, "step_ms": steps})


if __name__ == "__main__":
    main()

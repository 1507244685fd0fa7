"""What merging is worth on the embedded model, beside plain dropping: `python benchmarks/merge.py --help`.

Accuracy as in `recall.py`: prompts of one length, greedy answers; "unknown": the question comes as a second turn,
"known": with the context. The same policy drops or merges, so that every row of a pair lets the same kind of token go.
`--count 0`, and `--times` without numbers, leave a part out.
`noise` is twice the standard error of the difference to dropping, over prompts, in points.
"""

import argparse
from functools import partial
from math import sqrt
from statistics import mean, median, stdev
from typing import Any

import torch
from common import interleaved, save
from recall import TASKS, answer
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import get_task, make_samples

DISPOSALS = {
    "drop": "drop",
    "merge": "merge",
    "merge, cosine of 0.9": "merge(threshold=0.9)",
    "values only": "merge(values_only=True)",
    "values only, cosine of 0.9": "merge(values_only=True, threshold=0.9)",
}
HOSTS: dict[str, dict[str, Any]] = {
    "keydiff": {"policy": "keydiff"},
    "keydiff, separate heads": {"policy": "keydiff", "heads": "separate"},
    "h2o, allocator d2o": {"policy": "h2o", "allocator": "d2o"},
}


def variants(length: int) -> dict[str, dict[str, Any]]:
    """By name, the arguments of the cache."""
    return {
        f"{host} | {part}/16 | {name}": {"budget": part * length // 16, "disposal": text, **settings}
        for host, settings in HOSTS.items()
        for part in (1, 2)
        for name, text in DISPOSALS.items()
        if host == "keydiff" or name in ("drop", "merge")
    }


def accuracy(model: Any, tokenizer: Any, length: int, count: int, seed: int) -> dict[str, list[float]]:
    """Scores of all prompts, by variant and place of the question."""
    scores: dict[str, list[float]] = {}
    for task in TASKS:
        for sample in make_samples(task, tokenizer, length, count, seed):
            context = tokenizer(sample.context, return_tensors="pt")["input_ids"]
            whole = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
            question = whole[:, context.shape[1] :]
            for known, turns in (("unknown", [context, question]), ("known", [whole])):
                for name, settings in {"full": None, **variants(length)}.items():
                    cache = DynamicCache(config=model.config) if settings is None else None
                    cache = cache or PagedEvictionCache(model.config, **settings)
                    text = tokenizer.decode(answer(model, turns, cache, sample.max_new_tokens))
                    scores.setdefault(f"{name} | {known}", []).append(get_task(task).score(sample, text))
        print(task, {name: round(mean(of[-count:]), 2) for name, of in scores.items()}, flush=True)
    return scores


def summary(scores: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Means, and differences to dropping, in points."""
    found = {}
    for name, of in scores.items():
        *start, _, known = name.split(" | ")
        base = scores.get(" | ".join([*start, "drop", known]), of)
        gains = [100 * (one - other) for one, other in zip(of, base, strict=True)]
        found[name] = {"score": 100 * mean(of), "gain": mean(gains), "noise": 2 * stdev(gains) / sqrt(len(gains))}
    return found


@torch.inference_mode()
def step_time(model: Any, length: int, rounds: int, steps: int = 32) -> dict[str, float]:
    """Milliseconds of a decode step behind `length` tokens, the budget a sixteenth of them."""
    text = torch.randint(5, model.config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0))

    def decode(cache: DynamicCache) -> None:
        for _ in range(steps):
            model(input_ids=text[:, -1:], past_key_values=cache, use_cache=True)

    runs = {}
    for name in ("drop", "merge", "merge(values_only=True)"):
        cache = PagedEvictionCache(model.config, max(length // 16, 64), policy="keydiff", disposal=name)
        for start in range(0, length, 1024):
            model(input_ids=text[:, start : start + 1024], past_key_values=cache, use_cache=True, logits_to_keep=1)
        runs[name] = partial(decode, cache)
    times = interleaved(runs, rounds)
    return {name: 1e3 * median(values) / steps for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=10, help="prompts per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, nargs="*", default=[1024, 8192], help="lengths at which steps are timed")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation="paged_eviction")
    if options.count:
        scores = accuracy(model, tokenizer, options.length, options.count, options.seed)
        save("merge", {"settings": vars(options), "found": summary(scores)})
    if options.times:
        save("merge_steps", {"step_ms": {length: step_time(model, length, options.rounds) for length in options.times}})


if __name__ == "__main__":
    main()

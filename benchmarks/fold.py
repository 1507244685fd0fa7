"""What folding is worth on the embedded model, beside dropping and few bits: `python benchmarks/fold.py --help`.

The state of `fold:embedded` comes on top of its budget, so it is compared with dropping at the same bytes too, which is
the paper's yardstick, and with `bits=4`. Bytes are counted as for a model of 16 bits; the state has 32. Blocks of 8, so
that budgets can be nearly equal in bytes. `keydiff` chooses.

Accuracy: as in `recall.py`. "unknown": the question comes as a second turn, "known": with the prompt. `noise` is twice
the standard error of the difference to dropping at the same budget, over prompts, in points.

Perplexity: held-out texts, read in chunks; only tokens count for which something was evicted before.

Time: one decode step behind a long text, every variant in turn.
"""

import argparse
import json
import math
from functools import partial
from math import sqrt
from statistics import mean, median, stdev
from typing import Any

import torch
from accuracy_over_bytes import storage_bytes
from common import RESULTS, interleaved, save
from recall import TASKS, answer
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import get_task, held_out_texts, make_samples

BLOCK, CHUNK = 8, 32
FOLD = "fold:embedded"


def state_bytes(config: Any) -> int:
    """Of one row."""
    cache = PagedEvictionCache(config, budget=64, policy="keydiff", disposal=FOLD)
    for _, layer in cache.paged_layers:
        nothing = torch.zeros(1, config.num_key_value_heads, 1, config.head_dim)
        layer.update(nothing, nothing)
    return cache.stats().summary_bytes


def variants(config: Any, length: int, parts: tuple[int, ...]) -> dict[str, tuple[dict[str, Any], float]]:
    """By name, the arguments of the cache and its share of the bytes of the full one."""
    full, state = storage_bytes(config, length, None, BLOCK), state_bytes(config)
    found: dict[str, tuple[dict[str, Any], float]] = {}
    for part in parts:
        budget = part * length // 16
        own = storage_bytes(config, budget, None, BLOCK)
        found[f"{part}/16 | drop"] = {"budget": budget}, own / full
        found[f"{part}/16 | fold"] = {"budget": budget, "disposal": FOLD}, (own + state) / full
        for name, bits in (("drop, same bytes", None), ("bits=4, same bytes", 4)):
            fitting = [
                tokens
                for tokens in range(budget // 2 // BLOCK * BLOCK, 6 * budget, BLOCK)
                if storage_bytes(config, tokens, bits, BLOCK) <= own + state + BLOCK
            ]
            share = storage_bytes(config, fitting[-1], bits, BLOCK) / full
            found[f"{part}/16 | {name}"] = {"budget": fitting[-1], "bits": bits}, share
    return found


def make_cache(model: Any, settings: dict[str, Any] | None) -> DynamicCache:
    if settings is None:
        return DynamicCache(config=model.config)
    return PagedEvictionCache(model.config, block_size=BLOCK, policy="keydiff", **settings)


def accuracy(model: Any, tokenizer: Any, length: int, count: int, parts: tuple[int, ...]) -> dict[str, Any]:
    """Means, and differences to dropping at the same budget, in points."""
    scores: dict[str, list[float]] = {}
    named = {name: settings for name, (settings, _) in variants(model.config, length, parts).items()}
    for task in TASKS:
        for sample in make_samples(task, tokenizer, length, count, 0):
            context = tokenizer(sample.context, return_tensors="pt")["input_ids"]
            whole = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
            question = whole[:, context.shape[1] :]
            for known, turns in (("unknown", [context, question]), ("known", [whole])):
                for name, settings in {"full": None, **named}.items():
                    text = tokenizer.decode(answer(model, turns, make_cache(model, settings), sample.max_new_tokens))
                    scores.setdefault(f"{name} | {known}", []).append(get_task(task).score(sample, text))
        print(length, task, {name: round(mean(of[-count:]), 2) for name, of in scores.items()}, flush=True)
    found = {}
    for name, of in scores.items():
        budget, *_, known = name.split(" | ")
        base = scores.get(f"{budget} | drop | {known}", of)
        gains = [100 * (one - other) for one, other in zip(of, base, strict=True)]
        noise = 2 * stdev(gains) / sqrt(len(gains))
        found[name] = {"score": 100 * mean(of), "gain": mean(gains), "noise": noise}
    return found


@torch.inference_mode()
def perplexity(model: Any, tokenizer: Any, length: int, count: int, parts: tuple[int, ...]) -> dict[str, float]:
    """Per token of the last half of each window."""
    ids = [token for text in held_out_texts().values() for token in tokenizer(text, verbose=False)["input_ids"]]
    windows = [torch.tensor([ids[at : at + length + 1]]) for at in range(0, count * length, length)]
    named = {name: settings for name, (settings, _) in variants(model.config, length, parts).items()}
    found = {}
    for name, settings in {"full": None, **named}.items():
        total, tokens = 0.0, 0
        for window in windows:
            cache = make_cache(model, settings)
            for start in range(0, length, CHUNK):
                said = model(input_ids=window[:, start : start + CHUNK], past_key_values=cache, use_cache=True).logits
                if start >= length // 2:
                    wanted = window[0, start + 1 : start + 1 + CHUNK]
                    total += float(torch.nn.functional.cross_entropy(said[0], wanted, reduction="sum"))
                    tokens += len(wanted)
        found[name] = math.exp(total / tokens)
    print(length, {name: round(value, 2) for name, value in found.items()}, flush=True)
    return found


@torch.inference_mode()
def step_time(model: Any, length: int, rounds: int, steps: int = 16) -> dict[str, float]:
    """Milliseconds of a decode step behind `length` tokens, the budget a sixteenth of them."""
    text = torch.randint(5, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))

    def decode(cache: DynamicCache) -> None:
        for _ in range(steps):
            model(input_ids=text[:, :1], past_key_values=cache, use_cache=True)

    runs = {}
    named = {name: settings for name, (settings, _) in variants(model.config, length, (1,)).items()}
    for name, settings in {"full": None, **named}.items():
        cache = make_cache(model, settings)
        for start in range(0, length, 1024):
            model(input_ids=text[:, start : start + 1024], past_key_values=cache, use_cache=True, logits_to_keep=1)
        runs[name.removeprefix("1/16 | ")] = partial(decode, cache)
    times = interleaved(runs, rounds)
    return {name: 1e3 * median(values) / steps for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048], help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=10, help="prompts per task")
    parser.add_argument("--windows", type=int, default=12, help="windows of text per length")
    parser.add_argument("--times", type=int, nargs="*", default=[1024, 8192], help="lengths at which steps are timed")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation="paged_eviction")
    # What is not measured now stays as it was measured before.
    path, parts = RESULTS / "fold.json", (1, 2)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found = {name: found.get(name, {}) for name in ("accuracy", "perplexity", "device_share", "step_ms")}
    for length in options.lengths:
        shares = {name: share for name, (_, share) in variants(model.config, length, parts).items()}
        found["device_share"][str(length)] = shares
        if options.windows:
            values = perplexity(model, tokenizer, length, options.windows, parts)
            found["perplexity"][str(length)] = {"windows": options.windows, "values": values}
        if options.count:
            scores = accuracy(model, tokenizer, length, options.count, parts)
            found["accuracy"][str(length)] = {"count": options.count, "scores": scores}
        save("fold", found)
    for length in options.times:
        found["step_ms"][str(length)] = step_time(model, length, options.rounds)
        print(length, {name: f"{value:.2f} ms" for name, value in found["step_ms"][str(length)].items()})
    save("fold", found)


if __name__ == "__main__":
    main()

"""kvpress and this package on the same prompts, side by side: `python benchmarks/peers_table.py`.

Needs an environment with kvpress 0.5.5, transformers 5.2.0 and this package. Every prompt of the suite is compressed by
a press and by the policy that does the same, alone (kvpress knows no padding), then answered greedily, prompt by prompt
in turn:

- *kvpress*: the press leaves as many tokens as the budget; what is fed afterwards is held as well;
- *tokens*: this package with the same budget, which goes on evicting while it answers;
- *bytes*: this package in 4 bits, with as budget what the press held in bytes when it had compressed the context.

Policies decide per KV head as presses do, in blocks of 16 and with the protection that a cache has by default. The
model runs in bfloat16, so that bytes are those of a 16-bit cache. Results go to `results/peers_table.json`: mean score
over tasks and its standard error, tokens per layer and bytes held when the answer ends, and the median over prompts of
the step's time as a ratio to kvpress on the same prompt.
"""

import argparse
import time
from collections import defaultdict
from importlib.metadata import version
from itertools import product
from statistics import fmean, median
from typing import Any

import kvpress
import torch
from common import save
from pandas import DataFrame
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.caches.budgets import budgets_of
from hf_paged_eviction_eval.options.cache import CacheOptions
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.batches import make_batches
from hf_paged_eviction_eval.running.efficiency import kv_bytes
from hf_paged_eviction_eval.running.generation import Generator, until_end
from hf_paged_eviction_eval.tables.means import means
from hf_paged_eviction_eval.tasks import TASK_GROUPS

#: Our policy -> the press, at its own defaults.
PRESSES: dict[str, str] = {
    "random": "RandomPress",
    "key_norm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "streaming_llm": "StreamingLLMPress",
    "lagkv": "LagKVPress",
    "compactor": "CompactorPress",
    "snapkv": "SnapKVPress",
    "tova": "TOVAPress",
    "expected_attention": "ExpectedAttentionPress",
}
SIDES, BLOCK = ("kvpress", "tokens", "bytes"), 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32, help="prompts per task and seed")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--budgets", default="12.5%,25%")
    parser.add_argument("--modes", default="agnostic,aware")
    parser.add_argument("--policies", default=",".join(PRESSES), help="some of those that have a press")
    options = parser.parse_args()
    plain, tokenizer = embedded.load(torch.bfloat16)
    shown, _ = embedded.load(torch.bfloat16, PAGED_EVICTION)
    seeds, suite, scores = options.seeds.split(","), TASK_GROUPS["suite"], defaultdict(dict)
    for mode, budget, name in product(
        *(words.split(",") for words in (options.modes, options.budgets, options.policies))
    ):
        first = TaskSettings(
            policies=(), budgets=(budget,), block_size=BLOCK, tasks=suite, lengths=(options.length,),
            question_aware=mode == "aware", limit=options.samples, batch_size=1,
        )  # fmt: skip
        models = plain, shown if make_policy(name).needs.queries else plain
        answers = [row for seed in seeds for row in answered(*models, name, tokenizer, first.but(seed=int(seed)))]
        scores[f"{mode} {budget}"][name] = {side: summed(side, answers) for side in SIDES}
        print(mode, budget, name, scores[f"{mode} {budget}"][name], flush=True)
    columns = "mode and budget -> policy -> side: score and its standard error, tokens and bytes at the end, step time"
    facts = {"kvpress": version("kvpress"), "model": "embedded", "presses": PRESSES, "tasks": suite}
    sizes = {"samples": options.samples * len(seeds), "length": options.length, "block_size": BLOCK}
    save("peers_table", {**facts, **sizes, "columns": f"{columns} / kvpress", "scores": scores})


@torch.inference_mode()
def answered(plain: Any, own: Any, name: str, tokenizer: Any, run: TaskSettings) -> list[dict[str, Any]]:
    """What each side answers of every prompt: its score from 0 to 1, tokens per layer and KV head and bytes held when
    the answer ends, and the median seconds of feeding one token."""
    rows = []
    for batch in make_batches(run, tokenizer, plain.config):
        (prompt,), (budget,), row = batch.prompts, budgets_of(run), {"task": batch.task}
        tokens, size = budget.resolve(run.lengths[0], CacheOptions(block_size=BLOCK)) or len(prompt.context), 0
        for side in SIDES:
            generator = Generator(plain if side == "kvpress" else own, tokenizer, prompt.sample.stop_at_newline)
            if side == "kvpress":
                cache = DynamicCache()
                press = getattr(kvpress, PRESSES[name])(compression_ratio=max(1 - tokens / len(prompt.context), 0))
                with press(plain):
                    logits = feed(plain, prompt.context, 0, cache)
                size = _held(cache)[1]
            else:
                how: dict[str, Any] = {"budget": tokens} if side == "tokens" else {"budget": f"{size}B", "bits": 4}
                cache = PagedEvictionCache(own.config, block_size=BLOCK, policy=name, heads="separate", **how)
                logits = feed(own, prompt.context, 0, cache)
            ids, steps = answer(generator, prompt, cache, logits)
            right = prompt.sample.score(generator.text(ids))
            row[side] = (right, *_held(cache), median(steps) if steps else float("nan"))
        rows.append(row)
    return rows


def _held(cache: DynamicCache) -> tuple[float, int]:
    """Tokens per layer and KV head, and bytes of keys and values; all that the cache keeps, for this package."""
    if isinstance(cache, PagedEvictionCache):
        return float(cache.stats().largest_held), cache.stats().storage_bytes
    return fmean(layer.keys.shape[2] for layer in cache.layers), kv_bytes(cache)


def feed(model: Any, ids: tuple[int, ...], seen: int, cache: DynamicCache) -> Tensor:
    """Logits `[vocabulary]` after the last of these tokens."""
    positions = torch.arange(seen, seen + len(ids))[None]
    logits: Tensor = model(torch.tensor([ids]), position_ids=positions, past_key_values=cache, use_cache=True).logits
    return logits[0, -1]


def answer(generator: Generator, prompt: Any, cache: DynamicCache, logits: Tensor) -> tuple[list[int], list[float]]:
    """Greedy tokens, cut where the answer ends, and the seconds of each step."""
    seen, limit, ids, steps = len(prompt.context), prompt.sample.max_new_tokens, [], []
    if prompt.question:
        logits = feed(generator.model, prompt.question, seen, cache)
        seen += len(prompt.question)
    if generator.stop_at_newline:  # an answer has at least one token
        logits = logits.index_fill(0, torch.tensor(sorted(generator.ends)), float("-inf"))
    while True:
        ids.append(int(logits.argmax()))
        if len(ids) == limit or ids[-1] in generator.ends:
            return until_end(ids, limit, generator.ends), steps
        start = time.perf_counter()
        logits = feed(generator.model, (ids[-1],), seen, cache)
        steps.append(time.perf_counter() - start)
        seen += 1


def summed(side: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over tasks of their scores and its standard error, sizes, and the ratio of step times."""
    frame = DataFrame([{"all": 0, "task": row["task"], "score": row[side][0]} for row in rows])
    mean = means(frame, ["all"], "score", within=["task"])[0]
    return {
        "score": [round(mean.value, 4), round(mean.error or 0.0, 4)],
        "tokens": round(fmean(row[side][1] for row in rows), 1),
        "bytes": round(fmean(row[side][2] for row in rows)),
        "step / kvpress": round(median(row[side][3] / row["kvpress"][3] for row in rows if row["kvpress"][3] > 0), 3),
    }


if __name__ == "__main__":
    main()

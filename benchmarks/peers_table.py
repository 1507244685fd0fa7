"""kvpress and this package on the same prompts, side by side: `python benchmarks/peers_table.py`.

Needs an environment with kvpress 0.5.5, transformers 5.2.0 and this package. Every prompt of the suite is compressed by
a press and by the policy that does the same, alone (kvpress knows no padding) and to the same number of tokens, then
answered greedily. The policy decides per KV head as presses do, in blocks of 16 and with the protection that a cache
has by default; it goes on evicting while it answers, where kvpress grows. Results, mean score over tasks and its
standard error, go to `results/peers_table.json`.
"""

import argparse
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import product
from math import sqrt
from statistics import fmean, variance
from typing import Any

import kvpress
import torch
from common import save
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.options.cache import CacheOptions
from hf_paged_eviction_eval.prompting.prompts import Prompt, make_batches
from hf_paged_eviction_eval.prompting.suites import score
from hf_paged_eviction_eval.running.generation import Generator, until_end
from hf_paged_eviction_eval.settings import TaskSettings
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
BLOCK = 16
#: A prompt and how many tokens of its context may stay -> the cache, and logits if nothing is left to ask.
Compress = Callable[[Prompt, int], tuple[DynamicCache, Tensor]]


def main() -> None:
    options = arguments()
    peer, tokenizer = embedded.load()
    own, _ = embedded.load(attn_implementation=PAGED_EVICTION)
    found: dict[str, dict[str, Any]] = {}
    for name in options.policies.split(",") if options.policies else PRESSES:
        sides = {"kvpress": (peer, by_press(peer, name)), "here": (own, by_policy(own, name))}
        for mode, (side, (model, compress)) in product(options.modes.split(","), sides.items()):
            for budget in options.budgets.split(","):
                scores = list(answered(model, tokenizer, compress, settings(options, mode, budget)))
                found.setdefault(f"{mode} {budget}", {}).setdefault(name, {})[side] = mean_and_error(scores)
                print(mode, budget, name, side, found[f"{mode} {budget}"][name][side], flush=True)
    save(
        "peers_table",
        {
            "kvpress": version("kvpress"),
            "model": "embedded",
            "presses": PRESSES,
            "tasks": TASK_GROUPS["suite"],
            "samples": options.samples * len(options.seeds.split(",")),
            "length": options.length,
            "block_size": BLOCK,
            "columns": "mode and budget -> policy -> side: mean score of all tasks and its standard error",
            "scores": found,
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32, help="prompts per task and seed")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--budgets", default="12.5%,25%")
    parser.add_argument("--modes", default="agnostic,aware")
    parser.add_argument("--policies", help="some of those that have a press, with commas in between")
    return parser.parse_args()


def settings(options: argparse.Namespace, mode: str, budget: str) -> list[TaskSettings]:
    """One per seed."""
    first = TaskSettings(
        policies=(),
        budgets=(budget,),
        block_size=BLOCK,
        tasks=TASK_GROUPS["suite"],
        lengths=(options.length,),
        question_aware=mode == "aware",
        limit=options.samples,
        batch_size=1,
    )
    return [first.but(seed=int(seed)) for seed in options.seeds.split(",")]


def by_press(model: Any, name: str) -> Compress:
    """What kvpress does."""

    def compress(prompt: Prompt, tokens: int) -> tuple[DynamicCache, Tensor]:
        press = getattr(kvpress, PRESSES[name])(compression_ratio=max(1 - tokens / len(prompt.context), 0))
        cache = DynamicCache()
        with press(model):
            return cache, feed(model, prompt.context, 0, cache)

    return compress


def by_policy(model: Any, name: str) -> Compress:
    """What this package does."""

    def compress(prompt: Prompt, tokens: int) -> tuple[DynamicCache, Tensor]:
        cache = PagedEvictionCache(model.config, budget=tokens, block_size=BLOCK, policy=name, heads="separate")
        return cache, feed(model, prompt.context, 0, cache)

    return compress


def feed(model: Any, ids: tuple[int, ...], seen: int, cache: DynamicCache) -> Tensor:
    """Logits `[vocabulary]` after the last of these tokens."""
    positions = torch.arange(seen, seen + len(ids))[None]
    logits: Tensor = model(torch.tensor([ids]), position_ids=positions, past_key_values=cache, use_cache=True).logits
    return logits[0, -1]


@torch.inference_mode()
def answered(model: Any, tokenizer: Any, compress: Compress, runs: list[TaskSettings]) -> Iterator[tuple[str, float]]:
    """Task and score of every prompt."""
    for run in runs:
        (budget,) = run.parsed_budgets
        for batch in make_batches(run, tokenizer, model.config):
            (prompt,) = batch.prompts
            tokens = budget.resolve(run.lengths[0], CacheOptions(block_size=BLOCK)) or len(prompt.context)
            generator = Generator(model, tokenizer, prompt.sample.stop_at_newline)
            cache, logits = compress(prompt, tokens)
            said = list(answer(generator, prompt, cache, logits))
            yield batch.task, float(score(prompt.sample, generator.text(said), run))


def answer(generator: Generator, prompt: Prompt, cache: DynamicCache, logits: Tensor) -> list[int]:
    """Greedy tokens, cut where the answer ends."""
    seen, limit, said = len(prompt.context), prompt.sample.max_new_tokens, []
    if prompt.question:
        logits = feed(generator.model, prompt.question, seen, cache)
        seen += len(prompt.question)
    if generator.stop_at_newline:  # an answer has at least one token
        logits = logits.index_fill(0, torch.tensor(sorted(generator.ends)), float("-inf"))
    while True:
        said.append(int(logits.argmax()))
        if len(said) == limit or said[-1] in generator.ends:
            return until_end(said, limit, generator.ends)
        logits = feed(generator.model, (said[-1],), seen, cache)
        seen += 1


def mean_and_error(scores: list[tuple[str, float]]) -> list[float]:
    """Mean over tasks of their means, and its standard error."""
    tasks: dict[str, list[float]] = {}
    for task, value in scores:
        tasks.setdefault(task, []).append(value)
    mean = fmean(map(fmean, tasks.values()))
    noise = sqrt(sum(variance(each) / len(each) if len(each) > 1 else 0.0 for each in tasks.values())) / len(tasks)
    return [round(mean, 4), round(noise, 4)]


if __name__ == "__main__":
    main()

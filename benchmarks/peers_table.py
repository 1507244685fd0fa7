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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from math import sqrt
from statistics import fmean, median, variance
from typing import Any

import kvpress
import torch
from common import save
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache, make_policy
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.data.prompting.prompts import Prompt, make_batches
from hf_paged_eviction_eval.data.prompting.suites import score
from hf_paged_eviction_eval.options.cache import CacheOptions
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.generation import Generator, until_end
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
#: A prompt, how many tokens of its context may stay, and how many bytes -> the cache, and logits if nothing is left to
#: ask.
Compress = Callable[[Prompt, int, int], tuple[DynamicCache, Tensor]]


@dataclass(frozen=True)
class Answer:
    """One prompt, answered by one side.

    Attributes:
        score: from 0 to 1.
        tokens: held per layer and KV head when the answer ends.
        bytes: of keys and values held then; all that the cache keeps, for this package.
        step: median seconds of feeding one token.
    """

    score: float
    tokens: float
    bytes: int
    step: float


def main() -> None:
    options = arguments()
    plain, tokenizer = embedded.load(torch.bfloat16)
    shown, _ = embedded.load(torch.bfloat16, PAGED_EVICTION)
    names = options.policies.split(",") if options.policies else list(PRESSES)
    found: dict[str, dict[str, Any]] = {}
    for mode, budget, name in product(options.modes.split(","), options.budgets.split(","), names):
        own = shown if make_policy(name).needs.queries else plain
        sides = {
            "kvpress": (plain, by_press(plain, name)),
            "tokens": (own, by_policy(own, name)),
            "bytes": (own, by_policy(own, name, bits=4)),
        }
        answers = answered(sides, tokenizer, settings(options, mode, budget))
        found.setdefault(f"{mode} {budget}", {})[name] = summed(answers)
        print(mode, budget, name, found[f"{mode} {budget}"][name], flush=True)
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
            "columns": "mode and budget -> policy -> side: score and its standard error, tokens and bytes at the end, "
            "step time / kvpress",
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

    def compress(prompt: Prompt, tokens: int, _: int) -> tuple[DynamicCache, Tensor]:
        press = getattr(kvpress, PRESSES[name])(compression_ratio=max(1 - tokens / len(prompt.context), 0))
        cache = DynamicCache()
        with press(model):
            return cache, feed(model, prompt.context, 0, cache)

    return compress


def by_policy(model: Any, name: str, bits: int | None = None) -> Compress:
    """What this package does, with as many tokens, or in few bits with as many bytes."""

    def compress(prompt: Prompt, tokens: int, size: int) -> tuple[DynamicCache, Tensor]:
        how: dict[str, Any] = {"budget": tokens} if bits is None else {"budget": f"{size}B", "bits": bits}
        cache = PagedEvictionCache(model.config, block_size=BLOCK, policy=name, heads="separate", **how)
        return cache, feed(model, prompt.context, 0, cache)

    return compress


def size_of(cache: DynamicCache) -> int:
    """Bytes of keys and values."""
    if isinstance(cache, PagedEvictionCache):
        return cache.stats().storage_bytes
    return sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))


def tokens_of(cache: DynamicCache) -> float:
    """Tokens per layer and KV head."""
    if isinstance(cache, PagedEvictionCache):
        return float(cache.stats().largest_held)
    return fmean(layer.keys.shape[2] for layer in cache.layers)


def feed(model: Any, ids: tuple[int, ...], seen: int, cache: DynamicCache) -> Tensor:
    """Logits `[vocabulary]` after the last of these tokens."""
    positions = torch.arange(seen, seen + len(ids))[None]
    logits: Tensor = model(torch.tensor([ids]), position_ids=positions, past_key_values=cache, use_cache=True).logits
    return logits[0, -1]


@torch.inference_mode()
def answered(
    sides: dict[str, tuple[Any, Compress]], tokenizer: Any, runs: list[TaskSettings]
) -> Iterator[tuple[str, dict[str, Answer]]]:
    """Task, and what each side answers, of every prompt."""
    for run in runs:
        (budget,) = run.parsed_budgets
        for batch in make_batches(run, tokenizer, next(iter(sides.values()))[0].config):
            (prompt,) = batch.prompts
            tokens = budget.resolve(run.lengths[0], CacheOptions(block_size=BLOCK)) or len(prompt.context)
            found, size = {}, 0
            for side, (model, compress) in sides.items():
                generator = Generator(model, tokenizer, prompt.sample.stop_at_newline)
                cache, logits = compress(prompt, tokens, size)
                size = size or size_of(cache)  # of the press, which is the first
                said, steps = answer(generator, prompt, cache, logits)
                right = float(score(prompt.sample, generator.text(said), run))
                found[side] = Answer(right, tokens_of(cache), size_of(cache), median(steps) if steps else float("nan"))
            yield batch.task, found


def answer(generator: Generator, prompt: Prompt, cache: DynamicCache, logits: Tensor) -> tuple[list[int], list[float]]:
    """Greedy tokens, cut where the answer ends, and the seconds of each step."""
    seen, limit, said, steps = len(prompt.context), prompt.sample.max_new_tokens, [], []
    if prompt.question:
        logits = feed(generator.model, prompt.question, seen, cache)
        seen += len(prompt.question)
    if generator.stop_at_newline:  # an answer has at least one token
        logits = logits.index_fill(0, torch.tensor(sorted(generator.ends)), float("-inf"))
    while True:
        said.append(int(logits.argmax()))
        if len(said) == limit or said[-1] in generator.ends:
            return until_end(said, limit, generator.ends), steps
        start = time.perf_counter()
        logits = feed(generator.model, (said[-1],), seen, cache)
        steps.append(time.perf_counter() - start)
        seen += 1


def summed(answers: Iterator[tuple[str, dict[str, Answer]]]) -> dict[str, dict[str, Any]]:
    """Of each side: scores, sizes and the ratio of step times."""
    answers = list(answers)
    found = {}
    for side in answers[0][1]:
        ratios = [each[side].step / each["kvpress"].step for _, each in answers if each["kvpress"].step > 0]
        found[side] = {
            "score": mean_and_error([(task, each[side].score) for task, each in answers]),
            "tokens": round(fmean(each[side].tokens for _, each in answers), 1),
            "bytes": round(fmean(each[side].bytes for _, each in answers)),
            "step / kvpress": round(median(ratios), 3),
        }
    return found


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

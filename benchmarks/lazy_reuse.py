"""Lazy reuse (ours) against dropping the victim at once (the paper): `python benchmarks/lazy_reuse.py --help`.

Both choose blocks by the same scores and never hold more than the budget. Ours overwrites the victim one token at a
time, and what is not yet overwritten stays visible; the paper drops the whole block when the next token needs room, so
that what is visible goes back and forth between `budget - block` and `budget`. The second is simulated by a mask over
the first, which saves no time and no memory.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from common import save
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.layer.paged import PagedLayer
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.budgets import parse_budget
from hf_paged_eviction_eval.options.cache import CacheOptions
from hf_paged_eviction_eval.perplexity import make_text_jobs, token_losses
from hf_paged_eviction_eval.prompting.prompts import Batch, make_batches
from hf_paged_eviction_eval.prompting.suites import score
from hf_paged_eviction_eval.running.decoding import decode
from hf_paged_eviction_eval.running.generation import Generator
from hf_paged_eviction_eval.running.start import Reader
from hf_paged_eviction_eval.settings import TaskSettings, TextSettings
from hf_paged_eviction_eval.tasks import TASK_GROUPS

WAYS = ("lazy", "at once")


class DropAtOnce(PagedLayer):
    """Hides the tokens of the victim that are not overwritten yet."""

    def mask(self, query_length: int) -> Tensor | None:
        """See `PagedLayer.mask`."""
        mask = super().mask(query_length)
        if query_length > 1:
            return mask  # a forward of several tokens is decided on afterwards
        visible = ~self.left_over()[:, :, None]
        return visible if mask is None else mask & visible

    def left_over(self) -> Tensor:
        """`[batch, kv_heads, held]` bool, slots whose token the paper has dropped.

        They lie in the block of the newest token and are none of the newest `block_size` tokens: the victim is never
        the newest block.
        """
        positions, blocks = self.positions, self.block_table()
        newest = positions.amax(-1)
        current = (blocks == newest[..., None, None]).any(-1, keepdim=True)
        old = (blocks >= 0) & current & (blocks <= newest[..., None, None] - self.budget.block_size)
        dropped = blocks.masked_fill(~old, -1).flatten(2)
        return ((positions[..., None] == dropped[:, :, None]) & (positions >= 0)[..., None]).any(-1)


def make_cache(model: Any, way: str, mask: Tensor | None, **sizes: Any) -> PagedEvictionCache:
    """An empty cache of ours, or one that lets go of victims at once."""
    layers = model.config.num_hidden_layers
    # A budget per layer, though all are equal: such layers bring masks of their own.
    cache = PagedEvictionCache(model.config, attention_mask=mask, **{**sizes, "budget": [sizes["budget"]] * layers})
    if way == "at once":
        for _, layer in cache.paged_layers:
            layer.__class__ = DropAtOnce
    return cache


# ---- tasks ------------------------------------------------------------------------------------------------------


def task_scores(model: Any, tokenizer: Any, options: argparse.Namespace, aware: bool) -> Iterator[tuple[Any, float]]:
    """(policy, budget, task, sample, way) and a score, for every answer."""
    settings = TaskSettings(
        policies=(),
        budgets=tuple(options.budgets),
        block_size=options.block_size,
        tasks=TASK_GROUPS["suite"],
        lengths=(options.length,),
        question_aware=aware,
        limit=options.samples,
        batch_size=16,
    )
    for batch in make_batches(settings, tokenizer, model.config):
        yield from batch_scores(model, tokenizer, settings, batch, options.policies)


def batch_scores(
    model: Any, tokenizer: Any, settings: TaskSettings, batch: Batch, policies: Sequence[str]
) -> Iterator[tuple[Any, float]]:
    """The same of one batch."""
    samples = [prompt.sample for prompt in batch.prompts]
    generator = Generator(model, tokenizer, any(sample.stop_at_newline for sample in samples))
    reader = Reader(model, settings, generator)
    source = reader.source(batch.prompts, queries=True)
    inputs = reader.inputs(batch.prompts)
    for policy in policies:
        for budget in settings.parsed_budgets:
            tokens = budget.resolve(batch.length or 0, settings)
            for way in WAYS:
                sizes = {"budget": tokens, "block_size": settings.block_size, "policy": policy}
                start = reader.start(inputs, make_cache(model, way, inputs.context_mask, **sizes), source)
                answers = decode(generator, inputs, start, [sample.max_new_tokens for sample in samples]).answers
                for sample, answer in zip(samples, answers, strict=True):
                    key = (policy, budget.label, batch.task, sample.id, way)
                    yield key, score(sample, generator.text(answer), settings)


def compare(scores: dict[Any, float], policy: str, budget: str) -> dict[str, Any]:
    """Mean scores of both ways and the difference on the same samples, tasks counting the same."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for (name, label, task, sample, way), value in scores.items():
        if (name, label, way) == (policy, budget, "lazy"):
            groups.setdefault(task, []).append((value, scores[name, label, task, sample, "at once"]))
    means = [fmean(fmean(pair[index] for pair in pairs) for pairs in groups.values()) for index in (0, 1)]
    variances = []
    for pairs in groups.values():
        differences = [lazy - dropped for lazy, dropped in pairs]
        mean = fmean(differences)
        variances.append(sum((each - mean) ** 2 for each in differences) / max(len(pairs) - 1, 1) / len(pairs))
    return {
        "lazy": round(means[0], 4),
        "at_once": round(means[1], 4),
        "gain": round(means[0] - means[1], 4) + 0.0,  # no -0.0
        "gain_error": round(math.sqrt(sum(variances)) / len(groups), 4),
        "gain_by_task": {task: round(fmean(a - b for a, b in pairs), 4) for task, pairs in groups.items()},
    }


# ---- texts ------------------------------------------------------------------------------------------------------


def text_losses(model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[tuple[Any, Tensor]]:
    """(policy, tokens, way) and the losses `[texts, tokens - 1]`, one token per step."""
    settings = TextSettings(
        policies=(), budgets=("full",), files=(), limit=options.texts, length=options.text_length, batch_size=64
    )
    (job,) = make_text_jobs(settings, tokenizer)
    shortest = min(map(len, job.tokens))
    ids = torch.tensor([tokens[:shortest] for tokens in job.tokens])
    for policy in options.policies:
        for label in options.budgets:
            tokens = parse_budget(label).resolve(shortest, CacheOptions(block_size=options.block_size))
            for way in WAYS:
                sizes = {"budget": tokens, "block_size": options.block_size, "policy": policy}
                cache = make_cache(model, way, torch.ones_like(ids), **sizes)
                # Those before the first eviction are the same.
                yield (policy, label, tokens, way), token_losses(model, ids, cache, 1)[:, tokens:]


def perplexities(losses: dict[Any, Tensor], policy: str, budget: str) -> dict[str, Any]:
    """Perplexity after the budget is used up, of both ways, and their ratio with its standard error over texts."""
    lazy, dropped = (
        next(found.double() for key, found in losses.items() if key[:2] == (policy, budget) and key[3] == way)
        for way in WAYS
    )
    difference = (dropped - lazy).mean(1)
    error = difference.std().item() / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    ratio = math.exp(difference.mean().item())
    return {
        "tokens": next(key[2] for key in losses if key[:2] == (policy, budget)),
        "lazy": round(math.exp(lazy.mean().item()), 4),
        "at_once": round(math.exp(dropped.mean().item()), 4),
        "at_once_over_lazy": round(ratio, 5),
        "error": round(ratio * error, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["paged_eviction", "keydiff", "random"])
    parser.add_argument("--budgets", nargs="+", default=["6%", "12.5%", "25%", "50%"])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=32, help="prompts per task")
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--text-length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model, tokenizer = embedded.load(attn_implementation=PAGED_EVICTION)
    pairs = [(policy, budget) for policy in options.policies for budget in options.budgets]
    results: dict[str, Any] = {"command": "python benchmarks/lazy_reuse.py", "model": "embedded"}
    results["settings"] = vars(options)
    for aware in (True, False):
        found = dict(task_scores(model, tokenizer, options, aware))
        name = "question_aware" if aware else "question_agnostic"
        results[name] = {f"{policy} {budget}": compare(found, policy, budget) for policy, budget in pairs}
        print(name, *results[name].items(), sep="\n", flush=True)
    with torch.inference_mode():
        losses = dict(text_losses(model, tokenizer, options))
    results["perplexity"] = {f"{policy} {budget}": perplexities(losses, policy, budget) for policy, budget in pairs}
    print("perplexity", *results["perplexity"].items(), sep="\n")
    save("lazy_reuse", results)


if __name__ == "__main__":
    main()

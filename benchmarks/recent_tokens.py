"""What `recent_tokens=` is worth: `python benchmarks/recent_tokens.py --help`.

The embedded model predicts stretches of the held-out modules: in chunks (`chunks`, as `paged-eviction eval --text`), as
an answer, where a long prompt is read in one forward and the rest comes token by token (`answer`), or, if asked for,
all of it token by token (`stream`). Perplexity counts the tokens after the first eviction. Then the model answers the
tasks of the suite, whose question it meets after the context was compressed: what the newest tokens gain, older ones
lose.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import fmean, stdev
from typing import Any

import torch
from common import save
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.perplexity import token_losses
from hf_paged_eviction_eval.prompting.prompts import make_batches
from hf_paged_eviction_eval.prompting.suites import score
from hf_paged_eviction_eval.running.decoding import decode
from hf_paged_eviction_eval.running.generation import Generator
from hf_paged_eviction_eval.running.start import Reader
from hf_paged_eviction_eval.settings import TaskSettings
from hf_paged_eviction_eval.tasks import TASK_GROUPS, held_out_texts

WAYS = ("chunks", "answer", "stream")
#: What a policy is compared with: needs no protection of the newest tokens, as it keeps nothing else.
REFERENCE = "recency"


def variants(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """(policy, budget, recent_tokens)."""
    for budget in options.budgets:
        for policy in options.policies:
            yield from ((policy, budget, recent) for recent in options.recent)
        yield REFERENCE, budget, options.recent[0]


def make_cache(model: Any, variant: tuple[str, int, int], mask: Tensor | None) -> PagedEvictionCache:
    """An empty cache."""
    policy, budget, recent = variant
    return PagedEvictionCache(model.config, budget=budget, policy=policy, attention_mask=mask, recent_tokens=recent)


# ---- texts ------------------------------------------------------------------------------------------------------


def stretches(tokenizer: Any, length: int) -> Tensor:
    """`[stretches, length]` ids: the held-out modules cut into pieces that begin as a text does, modules in turns."""
    modules = []
    for content in held_out_texts().values():
        ids = tokenizer(content, verbose=False)["input_ids"][1:]
        pieces = [ids[at : at + length - 1] for at in range(0, len(ids) - length + 2, length - 1)]
        modules.append([[tokenizer.bos_token_id, *piece] for piece in pieces])
    return torch.tensor([piece for turn in zip_longest(*modules) for piece in turn if piece is not None])


@torch.inference_mode()
def losses(model: Any, ids: Tensor, cache: DynamicCache, way: str, options: argparse.Namespace) -> Tensor:
    """Negative log-likelihood `[stretches, tokens - 1]` of every token but the first."""
    if way != "answer":
        return token_losses(model, ids, cache, 1 if way == "stream" else options.chunk)
    prompt = options.prompt
    mask, positions = torch.ones_like(ids), torch.arange(ids.shape[1]).expand(len(ids), -1)
    found = []
    for part in (slice(0, prompt), *(slice(at, at + 1) for at in range(prompt, ids.shape[1] - 1))):
        logits = model(
            ids[:, part], attention_mask=mask[:, : part.stop], position_ids=positions[:, part], past_key_values=cache
        ).logits
        targets = ids[:, part.start + 1 : part.stop + 1]
        found.append(cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
    return torch.cat(found, dim=1)


def newest_held(cache: PagedEvictionCache, newest: int) -> float:
    """How many of a row's newest tokens are held, mean over layers, rows and heads."""
    positions = [layer.positions for _, layer in cache.paged_layers]
    return fmean((each > each.amax() - newest).sum(-1).double().mean().item() for each in positions)


def perplexities(model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per way and variant, with the ratio to the first `recent_tokens` on the same stretches."""
    ids = stretches(tokenizer, options.text_length)[: options.texts]
    for way in options.ways:
        full = losses(model, ids, DynamicCache(config=model.config), way, options)
        first: dict[Any, Tensor] = {}
        for variant in variants(options):
            policy, budget, recent = variant
            cache = make_cache(model, variant, torch.ones_like(ids))
            # What was predicted before the first eviction is the same for all.
            start = options.prompt if way == "answer" else budget
            own = losses(model, ids, cache, way, options)[:, start:].double().mean(1)
            before = first.setdefault((policy, budget), own)
            yield {
                "way": way,
                "policy": policy,
                "budget": budget,
                "recent_tokens": recent,
                "texts": len(own),
                "perplexity": round(own.mean().exp().item(), 4),
                "full": round(full[:, start:].double().mean().exp().item(), 4),
                **ratio(own - before),
                "newest_128_held": round(newest_held(cache, 128), 1),
            }


def ratio(differences: Tensor) -> dict[str, float]:
    """Of perplexities from differences of losses per stretch, with its standard error."""
    value = differences.mean().exp().item()
    error = value * differences.std().item() / math.sqrt(len(differences))
    return {"ratio": round(value, 5), "ratio_error": round(error, 5)}


# ---- tasks ------------------------------------------------------------------------------------------------------


def task_scores(model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[tuple[Any, float]]:
    """((variant, task, sample), score) for every answer; the question comes after the eviction."""
    settings = TaskSettings(
        policies=(),
        budgets=("full",),
        tasks=TASK_GROUPS["suite"],
        lengths=(options.length,),
        question_aware=False,
        limit=options.samples,
        batch_size=16,
    )
    for batch in make_batches(settings, tokenizer, model.config):
        samples = [prompt.sample for prompt in batch.prompts]
        generator = Generator(model, tokenizer, any(sample.stop_at_newline for sample in samples))
        reader = Reader(model, settings, generator)
        source, inputs = reader.source(batch.prompts, queries=False), reader.inputs(batch.prompts)
        for variant in variants(options):
            start = reader.start(inputs, make_cache(model, variant, inputs.context_mask), source)
            answers = decode(generator, inputs, start, [sample.max_new_tokens for sample in samples]).answers
            for sample, answer in zip(samples, answers, strict=True):
                yield (variant, batch.task, sample.id), score(sample, generator.text(answer), settings)


def task_rows(scores: dict[Any, float], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per variant: the mean score, tasks counting the same, and the gain over the first `recent_tokens`."""
    for variant in variants(options):
        policy, budget, recent = variant
        first = (policy, budget, options.recent[0])
        groups: dict[str, list[tuple[float, float]]] = {}
        for (which, task, sample), value in scores.items():
            if which == variant:
                groups.setdefault(task, []).append((value, value - scores[first, task, sample]))
        yield {
            "policy": policy,
            "budget": budget,
            "recent_tokens": recent,
            "score": round(fmean(fmean(value for value, _ in pairs) for pairs in groups.values()), 4),
            "gain": round(fmean(fmean(gain for _, gain in pairs) for pairs in groups.values()), 4) + 0.0,  # no -0.0
            "gain_error": round(_error([[gain for _, gain in pairs] for pairs in groups.values()]), 4),
        }


def _error(groups: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean of the groups' means."""
    return math.sqrt(sum(stdev(group) ** 2 / len(group) for group in groups)) / len(groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["keydiff", "calibrated:embedded", "paged_eviction"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--recent", nargs="+", type=int, default=[16, 64, 128], help="the first is compared with")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["chunks", "answer"])
    parser.add_argument("--texts", type=int, default=12, help="stretches of text at most")
    parser.add_argument("--text-length", type=int, default=1536)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a stretch that the answer follows")
    parser.add_argument("--chunk", type=int, default=64, help="tokens per forward")
    parser.add_argument("--samples", type=int, default=16, help="prompts per task")
    parser.add_argument("--length", type=int, default=1024, help="tokens per prompt")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model, tokenizer = embedded.load()
    results: dict[str, Any] = {"command": "python benchmarks/recent_tokens.py", "model": "embedded"}
    results["settings"] = vars(options)
    results["perplexity"] = []
    for row in perplexities(model, tokenizer, options):
        results["perplexity"].append(row)
        print(row, flush=True)
    results["tasks"] = list(task_rows(dict(task_scores(model, tokenizer, options)), options))
    print(*results["tasks"], sep="\n")
    save("recent_tokens", results)


if __name__ == "__main__":
    main()

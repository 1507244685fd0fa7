"""Train gates for the embedded model, and measure them: `python lab/training/embedded_gate.py --help`, with
PYTHONPATH=. and the harness installed.

The model answers questions that it is asked after the prompt was compressed, with the cache of each policy. Prompts are
of seeds by which nothing was chosen; differences are of the same prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import CACHE_ARGUMENT, feed
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.data.sample import Sample
from hf_paged_eviction_eval.tasks import TASK_GROUPS, make_samples
from hf_paged_eviction_lab.gate import Gate, install_gates, load_gates, save_gates
from hf_paged_eviction_lab.gate.fit import fit_gates
from training.calibrate import windows

#: Corpora are seeded apart from all samples; this one is neither that of the training nor that of the calibration.
_SEED = 2000
#: The tasks of the suite with an answer that is right or wrong.
TASKS = tuple(task for task in TASK_GROUPS["suite"] if task != "next_line")
FULL, GATE, CALIBRATED = "full cache", "gate", "calibrated"
POLICIES = (GATE, CALIBRATED, "keydiff", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=Path, required=True, help="the file; trained and written if it is not there")
    parser.add_argument("--questions", type=int, default=96, help="windows of text with questions to train on")
    parser.add_argument("--texts", type=int, default=48, help="windows of other text")
    parser.add_argument("--samples", type=int, default=16, help="prompts per task and seed to measure with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11])
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128])
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation="paged_eviction")
    if not options.gates.exists():
        taught = windows(tokenizer, _SEED, options.questions, options.texts)
        save_gates(
            fit_gates(model, taught, progress=lambda done, of: print(f"{done} of {of}", flush=True)), options.gates
        )
    gates = load_gates(options.gates)
    print(f"rank correlation with the target: {gates.facts['held_out_spearman']}")
    samples = [
        sample
        for seed in options.seeds
        for task in TASKS
        for sample in make_samples(task, tokenizer, 1024, options.samples, seed)
    ]
    with install_gates(model, gates), torch.inference_mode():
        for row in rows(model, tokenizer, gates, samples, options.budgets):
            print(row, flush=True)


def rows(model: Any, tokenizer: Any, gates: Any, samples: list[Sample], budgets: list[int]) -> Iterator[str]:
    """Rows of a table: mean score in % with its standard error, and the difference from calibrated scores."""

    def scores_of(make: Callable[[], Any]) -> list[float]:
        return [score(model, tokenizer, make(), sample) for sample in samples]

    yield "| tokens | policy | right, % | over `calibrated` |\n| ---: | --- | ---: | ---: |"
    yield f"| all | {FULL} | {_mean(scores_of(lambda: DynamicCache(config=model.config)))} | |"
    for budget in budgets:
        scores = {}
        for policy in POLICIES:
            chosen: Any = Gate(gates) if policy == GATE else policy
            profile = str(embedded.calibration_path()) if policy == CALIBRATED else None
            scores[policy] = scores_of(
                partial(PagedEvictionCache, model.config, budget, policy=chosen, profile=profile)
            )
        for policy, own in scores.items():
            over = [one - other for one, other in zip(own, scores[CALIBRATED], strict=True)]
            yield f"| {budget} | `{policy}` | {_mean(own)} | {'' if policy == CALIBRATED else _mean(over, '+')} |"


def score(model: Any, tokenizer: Any, cache: Any, sample: Sample) -> float:
    """Of the answer to a sample whose context is read first."""
    context, ids = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (sample.context, sample.prompt))
    feed(model, context, None, cache)
    settings = {"max_new_tokens": sample.max_new_tokens, "do_sample": False, CACHE_ARGUMENT: cache}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    right: float = sample.score(tokenizer.decode(said[0, ids.shape[1] :]))
    return right


def _mean(scores: list[float], sign: str = "") -> str:
    return f"{100 * fmean(scores):{sign}.1f} ± {100 * stdev(scores) / len(scores) ** 0.5:.1f}"


if __name__ == "__main__":
    main()

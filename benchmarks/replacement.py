"""Which block should make room when one comes back: `python benchmarks/replacement.py --help`.

The embedded model reads held-out text, token by token after the first half, under `recall`. Each layer's trace says
which blocks the query of each token asked for, and which of all blocks were not among twice as many: that is the
one-bit prediction. Each trace is then played against every replacement with as many frames as the cache has to spare.
`belady` knows the future: nothing does better. The weights of `learned` are fitted to the traces of the first text
(logistic regression: will the block be asked for within the next 16 tokens?) and tried on the others.
"""

import argparse
import time
from typing import Any

import torch
from common import save

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.disposals import recall
from hf_paged_eviction.disposals.replacement import Belady, Learned, available_replacements, make_replacement
from hf_paged_eviction.disposals.replacement.simulation import faults
from hf_paged_eviction.integration.cache_argument import cache_kwargs
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import held_out_texts

Trace = list[set[int]]


class Recording(recall.RecallAction):
    """Writes down what each query asked for."""

    def _choose(self, *arguments: Any) -> Any:
        choice = super()._choose(*arguments)
        trace, bits = self.__dict__.setdefault("recorded", ([], []))
        trace.append(set(choice.chosen[0, 0].nonzero()[:, 0].tolist()))
        bits.append(set((~choice.likely[0, 0]).nonzero()[:, 0].tolist()))
        return choice


@torch.inference_mode()
def record(model: Any, ids: torch.Tensor, budget: int, blocks: int) -> list[tuple[Trace, Trace]]:
    """Trace and predictions of each layer."""
    cache = PagedEvictionCache(model.config, budget, policy="keydiff", disposal=f"recall(blocks={blocks})")
    for _, layer in cache.paged_layers:
        layer.action.__class__ = Recording
    half = ids.shape[1] // 2
    model(input_ids=ids[:, :half], use_cache=True, **cache_kwargs(model, cache))
    for at in range(half, ids.shape[1]):
        model(input_ids=ids[:, at : at + 1], use_cache=True, **cache_kwargs(model, cache))
    return [layer.action.recorded for _, layer in cache.paged_layers]


def fit(traces: list[tuple[Trace, Trace]], horizon: int = 16) -> Learned:
    """Weights of `learned`: which block will be asked for within the next moments?"""
    features, labels = [], []
    for trace, bits in traces:
        last: dict[int, int] = {}
        often: dict[int, int] = {}
        for at, wanted in enumerate(trace[:-horizon]):
            for block in wanted:
                last[block], often[block] = at, often.get(block, 0) + 1
            soon = set().union(*trace[at + 1 : at + 1 + horizon])
            for block, seen in last.items():
                features.append([at - seen, often[block], float(block in bits[at])])
                labels.append(float(block in soon))
    x, y = torch.tensor(features), torch.tensor(labels)
    x[:, :2] = x[:, :2].log1p()
    weights, bias = torch.zeros(3, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights, bias], max_iter=60)

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(x @ weights + bias, y)
        value.backward()
        return value

    optimiser.step(loss)
    recency, frequency, unlikely = (round(weight, 2) for weight in weights.tolist())
    return Learned(recency, frequency, unlikely)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation="paged_eviction")
    texts = [tokenizer(text, return_tensors="pt", verbose=False)["input_ids"] for text in held_out_texts().values()]
    texts = [ids[:, : options.tokens] for ids in texts if ids.shape[1] >= options.tokens][: options.texts]
    traces = [record(model, ids, options.budget, options.blocks) for ids in texts]
    learned = fit(traces[0])
    print(f"learned from the first text: {learned.label}")
    frames = options.budget // 16 - 3
    counts: dict[str, int] = {}
    times: dict[str, float] = {}
    wanted_blocks = sum(len(wanted) for layers in traces[1:] for trace, _ in layers for wanted in trace)
    for name in available_replacements():
        start = time.perf_counter()
        for layers in traces[1:]:
            for trace, bits in layers:
                chosen = {"belady": lambda trace=trace: Belady(trace), "learned": lambda: learned}.get(name)
                replacement = chosen() if chosen else make_replacement(name)
                counts[name] = counts.get(name, 0) + faults(trace, frames, replacement, bits)
        times[name] = time.perf_counter() - start
    for name, count in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{name:14s} {count:8d} faults, {100 * count / wanted_blocks:5.1f} % of what was asked for")
    settings = {**vars(options), "texts_used": len(texts), "frames": frames, "asked": wanted_blocks}
    save("replacement", {"settings": settings, "faults": counts, "learned": learned.label})


if __name__ == "__main__":
    main()

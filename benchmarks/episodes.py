"""What episodes are worth in a conversation: `python benchmarks/episodes.py --help`.

The task `conversation`: four topics, two visits to each, then a question about one of them, which no cache knew of when
it was compressed. Beside episodes: one cache for the whole conversation, of the same bytes in all, and `recall`, which
has the same bytes on the device and everything in host memory. Greedy answers.

"each": every episode holds the whole budget, as in the paper, so that all together hold four times as much.
Seconds are those of the processor: reading a conversation into all its caches. "noise" is twice the standard error over
conversations, in points.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import mean, stdev
from typing import Any

import torch
from common import RESULTS, save
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import Episodes, PagedEvictionCache, compress_by_probe, read_episodes
from hf_paged_eviction.lab.episodes import RareTokens, layer_sensitivity
from hf_paged_eviction.recipes.procedures.probe import REPEAT
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import Sample, get_task, make_samples
from hf_paged_eviction_eval.tasks.conversation import split_turns

TOPICS = 4


@dataclass(frozen=True)
class Talk:
    """A conversation and its questions."""

    system: Tensor
    turns: list[Tensor]
    samples: list[Sample]

    @property
    def ids(self) -> Tensor:
        return torch.cat([self.system, *self.turns])[None]


@dataclass
class Found:
    """Of one variant: scores of all questions, and what one conversation took."""

    scores: list[float] = field(default_factory=list)
    in_use: list[int] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        talks = [100 * mean(self.scores[start : start + TOPICS]) for start in range(0, len(self.scores), TOPICS)]
        return {
            "score": mean(talks),
            "noise": 2 * stdev(talks) / sqrt(len(talks)) if len(talks) > 1 else 0.0,
            "by_conversation": talks,
            "by_topic": [100 * mean(self.scores[topic::TOPICS]) for topic in range(TOPICS)],
            "in_use_bytes": mean(self.in_use),
            "elsewhere_bytes": mean(self.elsewhere),
            "read_seconds": mean(self.seconds),
        }


#: From a conversation to a cache for each question, bytes in use while answering and bytes elsewhere.
Method = Callable[[Talk], tuple[Callable[[Tensor], DynamicCache], int, int]]


class Methods:
    """Ways to remember a conversation."""

    def __init__(self, model: Any, tokenizer: Any, sensitivity: Tensor) -> None:
        self.model, self.tokenizer, self.sensitivity = model, tokenizer, sensitivity

    def full(self) -> Method:
        def read(talk: Talk) -> Any:
            cache = DynamicCache(config=self.model.config)
            self.model(talk.ids, past_key_values=cache, logits_to_keep=1)
            count = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            return lambda question: copy.deepcopy(cache), count, 0

        return read

    def one(self, budget: int, **settings: Any) -> Method:
        def read(talk: Talk) -> Any:
            cache = PagedEvictionCache(self.model.config, budget, **settings)
            self.model(talk.ids, past_key_values=cache, logits_to_keep=1)
            stats = cache.stats()
            return lambda question: copy.deepcopy(cache), stats.storage_bytes + stats.summary_bytes, stats.host_bytes

        return read

    def probed(self, budget: int) -> Method:
        def read(talk: Talk) -> Any:
            room = -(-talk.ids.shape[1] // 16) * 16
            cache = PagedEvictionCache(self.model.config, room, policy="kvzip", heads="separate")
            probe = self.tokenizer(REPEAT, add_special_tokens=False)["input_ids"]
            compress_by_probe(self.model, cache, budget, talk.ids, probe_ids=probe)
            return lambda question: copy.deepcopy(cache), cache.stats().storage_bytes, 0

        return read

    def episodes(self, budget: int, count: int, *, rare: bool = True, layers: bool = False) -> Method:
        def read(talk: Talk) -> Any:
            found: Episodes = read_episodes(
                self.model,
                talk.turns,
                budget,
                system=talk.system,
                episodes=count,
                turns_per_segment=2,
                chunk_size=256,
                embed=RareTokens(talk.turns) if rare else None,
                layers=self.sensitivity if layers else None,
            )
            sizes = [found.open(number).stats().storage_bytes for number in range(len(found))]
            in_use = sum(sizes) // len(sizes)
            return lambda question: found.open(found.nearest(question)), in_use, sum(sizes) - in_use

        return read


def variants(ways: Methods, length: int, parts: Sequence[int]) -> dict[str, Method]:
    """By sixteenths of the text, in all, and name."""
    found: dict[str, Method] = {"16/16 | full": ways.full()}
    for part in parts:
        budget = part * length // 16
        held = budget - length // 16  # a box of a block takes as much as a token
        each: dict[str, Method] = {
            "one cache, keydiff": ways.one(budget, policy="keydiff"),
            "one cache, kvzip": ways.probed(budget),
        }
        if held >= 64:
            each["recall"] = ways.one(held, policy="keydiff", disposal=f"recall(blocks={held // 16 - 3})")
        if budget >= 2 * 64:
            each["2 episodes"] = ways.episodes(budget, 2)
        if budget >= 4 * 64:
            each["4 episodes"] = ways.episodes(budget, 4)
            each["4 episodes, hidden states"] = ways.episodes(budget, 4, rare=False)
        each["4 episodes, each"] = ways.episodes(4 * budget, 4)
        if budget > 64:  # less is what no layer may do without
            each["4 episodes, each, layers"] = ways.episodes(4 * budget, 4, layers=True)
        found |= {f"{part}/16 | {name}": method for name, method in each.items()}
    return found


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, cache: DynamicCache, question: Tensor, count: int) -> str:
    """Greedy tokens after a question `[n]`."""
    logits = model(question[None], past_key_values=cache, logits_to_keep=1).logits
    said: list[int] = []
    while True:
        said.append(int(logits[0, -1].argmax()))
        if len(said) == count:
            return str(tokenizer.decode(said, skip_special_tokens=True))
        logits = model(torch.tensor([said[-1:]]), past_key_values=cache).logits


def talks(tokenizer: Any, length: int, count: int, seed: int) -> list[Talk]:
    """So many conversations with all their questions."""
    samples = make_samples("conversation", tokenizer, length, count * TOPICS, seed)
    found = []
    for start in range(0, len(samples), TOPICS):
        system, turns = split_turns(samples[start].context)
        encoded = [torch.tensor(tokenizer(turn, add_special_tokens=False)["input_ids"]) for turn in turns]
        found.append(
            Talk(torch.tensor(tokenizer(system)["input_ids"]), encoded, samples[start : start + TOPICS]),
        )
    return found


def ask(model: Any, tokenizer: Any, talk: Talk, method: Method, found: Found) -> None:
    """Remember a conversation and ask its questions."""
    start = time.process_time()
    cache_for, in_use, elsewhere = method(talk)
    found.seconds.append(time.process_time() - start)
    found.in_use.append(in_use)
    found.elsewhere.append(elsewhere)
    for sample in talk.samples:
        question = torch.tensor(tokenizer(sample.question, add_special_tokens=False)["input_ids"])
        said = answer(model, tokenizer, cache_for(question), question, sample.max_new_tokens)
        found.scores.append(get_task("conversation").score(sample, said))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a conversation")
    parser.add_argument("--parts", type=int, nargs="*", default=[1, 2, 4], help="budgets, in sixteenths of them")
    parser.add_argument("--count", type=int, default=8, help="conversations, of four questions each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = embedded.load(attn_implementation="paged_eviction")
    # What is not measured now stays as it was measured before.
    path = RESULTS / "episodes.json"
    lengths = json.loads(path.read_text())["lengths"] if path.exists() else {}
    sensitivity = layer_sensitivity(model, talks(tokenizer, options.length, 1, options.seed + 1)[0].ids)
    methods = variants(Methods(model, tokenizer, sensitivity), options.length, options.parts)
    found = {name: Found() for name in methods}
    for talk in talks(tokenizer, options.length, options.count, options.seed):
        for name, method in methods.items():
            ask(model, tokenizer, talk, method, found[name])
        lengths[str(options.length)] = {
            "sensitivity": sensitivity.tolist(),
            "found": {name: of.summary() for name, of in found.items()},
        }
        save("episodes", {"lengths": lengths})


if __name__ == "__main__":
    main()

"""How much any score could find that does not know the question: `python benchmarks/gates_ceiling.py --help`.

A gate marks a token before anything is asked. The best that it can learn from its target is what the token really gets
from all the questions that its text could be asked. So each prompt is read together with all of them and their answers,
and a cache keeps what gets most attention from any ("every question"), or from the one that is asked ("this question"),
beside the gates and the calibrated scores. Not to be had in practice.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean, stdev
from typing import Any, cast

import torch
from common import save
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.gates import load_gates
from hf_paged_eviction.gates.install import attention_modules, hidden_states
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction.recipes.future import watch
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.tasks import get_task, make_samples
from hf_paged_eviction_eval.tasks.sample import Sample
from hf_paged_eviction_eval.tasks.task import NeedleTask, default_load
from hf_paged_eviction_eval.tasks.words import Words

#: Those that an eighth of a prompt is enough for, and a sixteenth is not.
TASKS = ("kv_recall_many", "variable_tracking", "span_copy")
CALIBRATED, GATE = "calibrated:embedded", "gate:embedded"
#: Tokens nearer than this are held in any case.
_NEAR = 16


class Reader:
    """A model that tells hidden states, and hands marks to caches.

    Attributes:
        hidden: what each layer was called with last.
        marks: of a layer and its hidden states; None = nobody is told.
    """

    def __init__(self) -> None:
        self.model, self.tokenizer = embedded.load()
        self.model.set_attn_implementation(PAGED_EVICTION)
        self.hidden: dict[int, Tensor] = {}
        self.marks: Mapping[int, Callable[[Tensor], Tensor]] | None = None
        for index, module in attention_modules(self.model).items():
            module.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    def _hook(self, index: int) -> Any:
        def hear(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.hidden[index] = hidden_states(args, kwargs)
            if self.marks is not None:
                kwargs["past_key_values"].layers[index].marks.arrive(self.marks[index](self.hidden[index]))

        return hear

    def feed(self, ids: list[int], cache: Any) -> Tensor:
        """The logits after the last of some tokens."""
        found: Tensor = self.model(input_ids=torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
        return found[:, -1]

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def attention(self, ids: list[int], behind: list[int]) -> dict[int, Tensor]:
        """By layer, the most that each of these tokens gets from those behind."""
        found: dict[int, Tensor] = {}
        tokens = torch.tensor([ids + behind])
        watch(
            self.model, tokens, None, _NEAR, lambda seen: found.update({seen.layer_idx: seen.future[:, :, : len(ids)]})
        )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="prompts per task and seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    reader, found = Reader(), []
    for seed in options.seeds:
        for task in TASKS:
            for sample in make_samples(task, reader.tokenizer, options.length, options.samples, seed):
                found += list(scores(reader, sample, options.budget))
            print(f"seed {seed}, {task}: done", flush=True)
    save(
        "gates_ceiling", {"rows": summary(found), "settings": vars(options) | {"tasks": list(TASKS), "block_size": 16}}
    )


@torch.inference_mode()
def scores(reader: Reader, sample: Sample, budget: int) -> Iterator[tuple[bool, str, Sample, float]]:
    """Whether the question is known, who decides, the sample and its score."""
    ids, question = reader.tokenizer(sample.context)["input_ids"], reader.encode(sample.question)
    gates = load_gates("embedded").layers
    reader.marks = None
    read = DynamicCache(config=reader.model.config)
    logits = reader.feed(ids + question, read)
    hidden = dict(reader.hidden)
    behind = asked(reader, sample)
    known = {
        "every question": reader.attention(ids, [token for each in behind for token in each]),
        "this question": reader.attention(ids, behind[0]),
    }
    for aware in (False, True):
        count = len(ids) + aware * len(question)
        for name in (CALIBRATED, GATE, *known):
            policy = CALIBRATED if name == CALIBRATED else GATE
            cache = PagedEvictionCache(reader.model.config, budget=budget, block_size=16, policy=policy)
            for index, layer in enumerate(read.layers):
                if policy == GATE:
                    marks = gates[index](hidden[index][:, :count])
                    if name in known:
                        marks = torch.zeros_like(marks)
                        marks[:, :, : len(ids)] = known[name][index]
                    cache.layers[index].marks.arrive(marks)
                cache.update(layer.keys[:, :, :count], layer.values[:, :, :count], index)
            reader.marks = gates if policy == GATE else None
            first = logits if aware else reader.feed(question, cache)
            answer = speak(reader, cache, first, sample.max_new_tokens)
            reader.marks = None
            yield aware, name, sample, get_task(sample.task).score(sample, answer)


def asked(reader: Reader, sample: Sample) -> list[list[int]]:
    """All questions that the text of a sample could be asked, with their answers; its own is the first."""
    task = cast(NeedleTask, get_task(sample.task))
    _, length, seed, index = sample.id.split("/")
    rng = task._rng(int(length), int(index), int(seed))
    queries = task.draw(rng, Words(rng), default_load(int(length))).queries
    end = reader.tokenizer.eos_token_id
    return [[*reader.encode(query.question), *reader.encode(query.completion), end] for query in queries]


def speak(reader: Reader, cache: Any, logits: Tensor, most: int) -> str:
    """The greedy answer."""
    said: list[int] = []
    while len(said) < most and (token := int(logits.argmax())) != reader.tokenizer.eos_token_id:
        said.append(token)
        logits = reader.feed([token], cache)
    answer: str = reader.tokenizer.decode(said)
    return answer


def summary(found: list[tuple[bool, str, Sample, float]]) -> list[dict[str, Any]]:
    """A row per place of the question and who decides; differences are of the same prompts."""
    rows = []
    for aware in (False, True):
        by_name: dict[str, dict[str, float]] = {}
        for _, name, sample, score in (each for each in found if each[0] == aware):
            by_name.setdefault(name, {})[sample.id] = score
        for name, own in by_name.items():
            differences = [own[key] - by_name[CALIBRATED][key] for key in own]
            by_task = {task: fmean(score for key, score in own.items() if key.startswith(f"{task}/")) for task in TASKS}
            rows.append(
                {
                    "question": "known" if aware else "unknown",
                    "keeps": name,
                    "score": round(fmean(own.values()), 4),
                    "over_calibrated": round(fmean(differences), 4),
                    "over_calibrated_error": round(stdev(differences) / len(differences) ** 0.5, 4),
                    "tasks": {task: round(score, 4) for task, score in by_task.items()},
                }
            )
    return rows


if __name__ == "__main__":
    main()

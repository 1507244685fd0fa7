"""What caches keep in shares of the memory of 16-bit keys and values: rows of real models, in one resumable command.

    python benchmarks/memory_rows.py run --model results/models/SmolLM2-135M-Instruct.Q4_1 --name smollm2
    python benchmarks/memory_rows.py keep            # to where the tables of README and docs are made of

A prompt is read once; its keys, values and queries then fill every cache, which is fed the question and the true answer
in one forward. Right: every token of the answer is the cache's first choice. Only prompts that the full cache answers
count. Whatever dtype the model runs in, a cache holds as many tokens as it would in 16 bits.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from hf_paged_eviction import PagedEvictionCache, prepare
from hf_paged_eviction.integration.feeding import feed
from hf_paged_eviction.naming.sizes import MemoryShare
from hf_paged_eviction.preparing.recording import Recording
from hf_paged_eviction_eval.data.library import held_out_texts
from hf_paged_eviction_eval.data.prompting.chat_template import has_template, wrap
from hf_paged_eviction_eval.tasks import get_task
from hf_paged_eviction_eval.tasks.words import random_key

KEPT = RESULTS / "memory"
LENGTH, GOING_ON, FACTS, ASKED = 896, 128, 12, 4
#: One fact in about 900 tokens.
SINGLE = ("passkey", "ruler_niah_single_2", "ruler_niah_single_3", "ruler_niah_multikey_1")
SEED = 78
Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """Ids after a context, `[1, n]` each: a question, and its answer."""

    ask: Tensor
    answer: Tensor


@dataclass(frozen=True)
class Prompt:
    """A text, `[1, tokens]`, and questions about it; of text that goes on, one whose question is empty."""

    name: str
    context: Tensor
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Kind:
    """One line of the tables.

    Attributes:
        name: what rows call it.
        options: of the cache.
        prepared: whether the cache finds the model's profile.
    """

    name: str
    options: dict[str, Any]
    prepared: bool = False


PREPARED = Kind("prepared", {}, prepared=True)
WITHOUT = Kind("without", {})
PUBLISHED = {name: Kind(name, {"policy": name}) for name in ("paged_eviction", "snapkv", "tova", "random")}
#: Uses that are measured together, since they share a reading of the text.
USES = (("later", "before"), ("twelve",), ("text",))
_BASELINES = PUBLISHED["paged_eviction"], PUBLISHED["random"]
#: What is measured, the first first.
STAGES: tuple[Sequence[tuple[Kind, float]], ...] = (
    ((PREPARED, 1 / 8), (PREPARED, 1 / 16), *((kind, 1 / 8) for kind in (WITHOUT, *_BASELINES))),
    ((PREPARED, 1 / 4), (PREPARED, 1 / 2), *((kind, 1 / 4) for kind in (WITHOUT, *_BASELINES))),
    tuple((kind, share) for share in (1 / 8, 1 / 4) for kind in (PUBLISHED["snapkv"], PUBLISHED["tova"])),
    tuple((kind, 1 / 16) for kind in (WITHOUT, *PUBLISHED.values())),
    tuple((kind, 1 / 2) for kind in (WITHOUT, *PUBLISHED.values())),
)
#: Prompts of each use that the full cache answers.
COUNT = 60


# ---- prompts --------------------------------------------------------------------------------------------------------


def prompts(tokenizer: Any, use: str) -> Iterator[Prompt]:
    """Prompts of one use without end, the same each time; "later" and "before" have the same."""
    make = {"twelve": _twelve, "text": _text}.get(use, _single)
    index = 0
    while (prompt := make(tokenizer, index)) is not None:
        yield prompt
        index += 1


def _single(tokenizer: Any, index: int) -> Prompt:
    task = SINGLE[index % len(SINGLE)]
    chat = has_template(tokenizer)
    sample = get_task(task).make(tokenizer, LENGTH + 64, index // len(SINGLE), SEED, chat)
    return _asked(tokenizer, f"{task} {index}", sample.context, [(sample.question, sample.cue, sample.answers[0])])


def _twelve(tokenizer: Any, index: int) -> Prompt | None:
    found = twelve_passkeys(tokenizer, index)
    return None if found is None else _asked(tokenizer, f"twelve {index}", *found)


def twelve_passkeys(tokenizer: Any, index: int) -> tuple[str, list[tuple[str, str, str]]] | None:
    """Documentation with twelve passkeys of five digits, of which four are asked for: question, cue and answer."""
    draw = random.Random(f"{SEED} {index}")
    text = _passage(tokenizer, index, LENGTH - 20 * FACTS)
    if text is None:
        return None
    names = list({random_key(draw): None for _ in range(4 * FACTS)})[:FACTS]
    keys = [str(draw.randrange(10_000, 100_000)) for _ in names]
    lines = text.split("\n")
    facts = [f"The passkey of the {name} is {key}." for name, key in zip(names, keys, strict=True)]
    for place, fact in sorted(zip((draw.randrange(len(lines) + 1) for _ in facts), facts, strict=True), reverse=True):
        lines.insert(place, fact)
    asked = draw.sample(range(FACTS), ASKED)
    questions = [
        (f"What is the passkey of the {names[at]}?", f" The passkey of the {names[at]} is", keys[at]) for at in asked
    ]
    return "\n".join(lines) + "\n", questions


def _asked(tokenizer: Any, name: str, text: str, questions: Sequence[tuple[str, str, str]]) -> Prompt:
    """In the chat template, where there is one; the answer begins with the cue."""

    def encode(words: str) -> Tensor:
        return torch.tensor([tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]])

    asked, context = [], ""
    for ask, cue, answer in questions:
        if has_template(tokenizer):
            context, rest = wrap(text, ask, tokenizer, cue)
        else:
            bos = tokenizer.decode(tokenizer("")["input_ids"]) if tokenizer("")["input_ids"] else ""
            context, rest = bos + text, ask + ("" if ask.endswith(cue) else cue)
        whole, front = encode(f"{rest} {answer}"), encode(rest)
        count = front.shape[1]
        if not torch.equal(whole[:, :count], front):
            raise ValueError(f"{name}: the answer changes the tokens of {rest!r}")
        asked.append(Question(front, whole[:, count:]))
    return Prompt(name, encode(context), tuple(asked))


def _text(tokenizer: Any, index: int) -> Prompt | None:
    """Documentation and code, by turns."""
    if index % 2:
        code = "\n\n".join(held_out_texts().values())
        ids = tokenizer(code, add_special_tokens=False, verbose=False)["input_ids"]
        at = index // 2 * (LENGTH + GOING_ON)
        ids = ids[at : at + LENGTH + GOING_ON]
    else:
        text = _passage(tokenizer, index // 2, LENGTH + GOING_ON)
        ids = [] if text is None else tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids = ids[: LENGTH + GOING_ON]
    if len(ids) < LENGTH + GOING_ON // 2:
        return None
    opening = [token for token in tokenizer("")["input_ids"] if token != tokenizer.eos_token_id][:1]
    rest = torch.tensor([ids[LENGTH:]])
    return Prompt(f"text {index}", torch.tensor([opening + ids[:LENGTH]]), (Question(rest[:, :1], rest[:, 1:]),))


def _passage(tokenizer: Any, index: int, tokens: int) -> str | None:
    """A part of the documentation behind what `prepare` reads."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    whole = whole[len(whole) * 11 // 20 :]
    part = whole[index * 3400 : (index + 2) * 3400]
    ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    return tokenizer.decode(ids) if len(ids) > tokens * 3 // 4 else None


# ---- caches ---------------------------------------------------------------------------------------------------------


class Caches:
    """Makes caches of one model for shares of the memory of a text.

    Args:
        config: of the model. A copy of it has no profile.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._configs = {True: config, False: copy.deepcopy(config)}
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def make(self, kind: Kind, share: float, read: Recording) -> PagedEvictionCache:
        """An empty cache that holds as many tokens as this share of the text's keys and values takes in 16 bits.

        Raises:
            ValueError: the share is too small.
        """
        key = kind.name, MemoryShare(share, read.ids.shape[1]).text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if key not in self._known:
                self._known[key] = self._arguments(kind, share, key[1], read)
            return PagedEvictionCache(self._configs[kind.prepared], **self._known[key])

    def _arguments(self, kind: Kind, share: float, budget: str, read: Recording) -> dict[str, Any]:
        trial = self._trial(kind, budget, read, kind.options)
        sizes = trial.paged_layers[0][1].budget
        chosen = {"policy": trial.policy, "allocator": trial.allocator, "bits": trial.bits}
        if sizes.tokens == sizes.smallest:  # what a share that is too small becomes; bytes are refused
            in_16_bits = 2 * sum(states.numel() for token in read.token.values() for states in token)
            in_bytes = f"{int(share * in_16_bits * read.ids.shape[1])}B"
            self._trial(kind, in_bytes, read, {**kind.options, **chosen})
        ends = {"sink_tokens": sizes.protected, "recent_tokens": sizes.recent, "block_size": sizes.block_size}
        return {**kind.options, "budget": trial.budget, **chosen, **ends}

    def _trial(self, kind: Kind, budget: str, read: Recording, options: dict[str, Any]) -> PagedEvictionCache:
        """A cache that has taken a token of each layer, so that it knows its budget in tokens."""
        trial = PagedEvictionCache(self._configs[kind.prepared], budget, **options)
        for index, (keys, values) in read.token.items():
            trial.update(keys, values, index)
        return trial


# ---- rows -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def rows_of(
    model: Any, caches: Caches, uses: Sequence[str], prompt: Prompt, wanted: Sequence[tuple[Kind, float]]
) -> Iterator[Row]:
    """A row for each use, question, kind and share; one row of questions that the full cache does not answer."""
    context = Recording(model, prompt.context)
    for number, question in enumerate(prompt.questions):
        ids = torch.cat([question.ask, question.answer], 1)
        full = _predicted(model, ids, copy.deepcopy(context.cache), question)
        answered = uses == ["text"] or _right(full, question)
        for use in uses:
            head = {"use": use, "prompt": f"{prompt.name} {number}", "tokens": context.ids.shape[1]}
            yield {**head, "cache": "full", "right": answered, "loss": _loss(full, question)}
            if not answered:
                continue
            # If the question is read with the text, the first token of the answer is predicted before anything goes.
            before = use == "before"
            read, rest = (Recording(model, question.ask, context), question.answer) if before else (context, ids)
            for kind, share in wanted:
                row = {**head, "cache": kind.name, "share": share}
                try:
                    cache = caches.make(kind, share, read)
                except ValueError as error:
                    yield {**row, "refused": str(error)}
                    continue
                read.play(cache)
                held = {"held": cache.budget, "bits": cache.bits}
                cache.activate_past_recording()
                logits = _predicted(model, rest, cache, question)
                same = full[-len(logits) :]
                far = (same.exp() * (same - logits)).sum(-1).mean()
                result = {"right": _right(logits, question), "kl": float(far), "loss": _loss(logits, question)}
                yield {**row, **held, **result}


def _predicted(model: Any, ids: Tensor, cache: Any, question: Question) -> Tensor:
    """Log-probabilities `[answer, vocabulary]` of the tokens of the answer that `ids` `[1, n]` predicts."""
    count = min(question.answer.shape[1], ids.shape[1] - 1)
    return feed(model, ids, None, cache, keep=count + 1)[0, -count - 1 : -1].float().log_softmax(-1)


def _right(predicted: Tensor, question: Question) -> bool:
    return bool((predicted.argmax(-1) == question.answer[0, -len(predicted) :]).all())


def _loss(predicted: Tensor, question: Question) -> float:
    answer = question.answer[0, -len(predicted) :]
    return float(-predicted.gather(-1, answer[:, None]).mean())


# ---- run ------------------------------------------------------------------------------------------------------------


class Rows:
    """The rows of one model, in a file that grows.

    Args:
        path: lines of JSON: what the run is, then rows. The last line may be cut.
        subject: what the run is.

    Raises:
        SystemExit: the file is of another run.
    """

    def __init__(self, path: Path, subject: Row) -> None:
        self._path = path
        lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else [json.dumps(subject)]
        if json.loads(lines[0]) != subject:
            raise SystemExit(f"{path} is of another run: {lines[0]}; this one is {json.dumps(subject)}")
        self.rows: list[Row] = [json.loads(line) for line in lines[1:]]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, ""]), "utf-8")
        self._known = {_key(row) for row in self.rows}

    def add(self, row: Row) -> None:
        """Append a row, unless it is there."""
        if _key(row) not in self._known:
            self._known.add(_key(row))
            self.rows.append(row)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def missing(self, use: str, prompt: Prompt, wanted: Sequence[tuple[Kind, float]]) -> list[tuple[Kind, float]]:
        """What a prompt still lacks; nothing if the full cache answers none of its questions."""
        names = {f"{prompt.name} {number}" for number in range(len(prompt.questions))}
        full = {row["prompt"]: row["right"] for row in self.rows if row["cache"] == "full" and row["use"] == use}
        open_names = {name for name in names if full.get(name, True)}
        return [
            (kind, share)
            for kind, share in wanted
            if any((use, name, kind.name, share) not in self._known for name in open_names)
        ]

    def answered(self, use: str, prompt: Prompt) -> int:
        """How many questions of a prompt the full cache answers."""
        names = {f"{prompt.name} {number}" for number in range(len(prompt.questions))}
        return sum(
            row["cache"] == "full" and row["use"] == use and row["right"] and row["prompt"] in names
            for row in self.rows
        )


def _key(row: Row) -> tuple[str, str, str, float | None]:
    return row["use"], row["prompt"], row["cache"], row.get("share")


def run(options: argparse.Namespace) -> None:
    """Measure what is missing, stage after stage."""
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    print(prepare(model, tokenizer))
    best = PagedEvictionCache(model.config, "1MiB")
    chosen = {"policy": type(best.policy).__name__, "bits": best.bits, "allocator": type(best.allocator).__name__}
    subject = {"model": options.name, "dtype": options.dtype, "seed": SEED, "length": LENGTH, "prepared": chosen}
    path = options.rows / f"{options.name}_{options.dtype}.jsonl"
    rows, caches = Rows(path, json.loads(json.dumps(subject))), Caches(model.config)
    for number, wanted in enumerate(STAGES[: options.stages], 1):
        streams = {uses: prompts(tokenizer, uses[0]) for uses in USES}
        done = dict.fromkeys(USES, 0)
        while streams:
            uses = min(streams, key=lambda uses: done[uses])
            prompt = next(streams[uses], None)
            if prompt is None or done[uses] >= options.count:
                del streams[uses]
                continue
            if missing := rows.missing(uses[-1], prompt, wanted):
                for row in rows_of(model, caches, list(uses), prompt, missing):
                    rows.add(row)
            done[uses] += rows.answered(uses[0], prompt)
            print(f"stage {number}: " + ", ".join(f"{uses[0]} {count}" for uses, count in done.items()), flush=True)


def keep(options: argparse.Namespace) -> None:
    """Copy rows to where the tables are made of."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for path in sorted(options.rows.glob("*.jsonl")):
        (KEPT / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--model", required=True, help="a folder in safetensors")
    running.add_argument("--name", required=True, help="what the rows call it")
    running.add_argument("--dtype", default="bfloat16")
    running.add_argument("--count", type=int, default=COUNT, help="prompts of each use that the full cache answers")
    running.add_argument("--stages", type=int, default=len(STAGES), help="how many of them")
    running.add_argument("--threads", type=int, default=1)
    for command in (running, commands.add_parser("keep")):
        command.add_argument("--rows", type=Path, default=Path("results/memory"))
    options = parser.parse_args()
    {"run": run, "keep": keep}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())

"""Long texts, read in chunks, then asked: rows of real models, in one resumable command.

    python benchmarks/long_rows.py run --model results/models/SmolLM2-135M-Instruct.Q4_1 --name smollm2
    python benchmarks/long_rows.py run --model FOLDER --name qwen --length 8192 --documents 6 --caches prepared@1/8,int4
    python benchmarks/long_rows.py run --model FOLDER --name qwen --answers 4 --caches prepared@1/4,prepared@1/8,int4
    python benchmarks/long_rows.py table

A document holds facts of every kind (`long_documents.py`). Each cache reads it once, in chunks, and every question is
put to a copy of that cache, so nothing is known of a question while tokens are evicted. Caches other than the full one
are asked only what the full cache answers. The answer is the greedy continuation of the question: the expected answer
is fed in one forward, and only where the cache's first choice differs does it go on alone, token by token.

Caches, of which shares are of the bytes of 16-bit keys and values:
  prepared@1/8     the default for this many bytes, with the profile of `prepare` (measured first, if there is none)
  unprepared@1/8   the default for this many bytes, without a profile
  POLICY@1/8       any policy of this package, in 16 bits, so that its share of tokens is the same
  int4, int2       `QuantizedCache` of transformers with optimum-quanto, which has the size that it has

Rows are written when a cache is done with a document; a run that was stopped goes on with the next one. The file has
one row for each document, cache and question, one for the text that follows, and one for reading: seconds of the CPU,
the bytes of all tensors of the cache, most while it read and at the end, and of these the keys and values; the others
are positions, scores, and statistics of queries. `table` counts documents as the sample.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, timed_on
from long_documents import Document, Question, document
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

from hf_paged_eviction import PagedEvictionCache, prepare
from hf_paged_eviction.integration.feeding import feed

FILE = RESULTS / "long_rows.jsonl"
FULL, PREPARED, UNPREPARED = "full", "prepared", "unprepared"
#: Tokens by which an answer may be longer than the expected one.
_LONGER = 8
#: Tokens of a long answer, and of a part of it that has a row of its own.
_ANSWER, _PART = 1000, 250
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A cache that is measured, and its share of the bytes of 16-bit keys and values; "" = the size that it has."""

    name: str
    share: str = ""

    @classmethod
    def of(cls, text: str) -> Kind:
        """Read `prepared@1/8`.

        Raises:
            ValueError: the share is missing, or none.
        """
        name, _, share = text.strip().partition("@")
        if name in (FULL, "int4", "int2"):
            if share:
                raise ValueError(f"{text!r}: {name} has no share, write {name!r}")
        elif not share or not 0 < Fraction(share) <= 1:
            raise ValueError(f"{text!r}: expected a share of the bytes, such as {name}@1/8")
        return cls(name, share)

    def make(self, config: Any, tokens: int) -> Any:
        """An empty cache for a text of so many tokens."""
        if self.name == FULL:
            return DynamicCache(config=config)
        if not self.share:
            bits = int(self.name.removeprefix("int"))
            sizes = {"axis_key": 0, "axis_value": 0, "q_group_size": 64, "residual_length": 128}
            return QuantizedCache("quanto", config, nbits=bits, **sizes)
        share = Fraction(self.share)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no profile is what is measured
            if self.name in (PREPARED, UNPREPARED):
                # Profiles are found by the configuration object: a copy has none.
                config = config if self.name == PREPARED else copy.deepcopy(config)
                return PagedEvictionCache(config, f"{int(bytes_per_token(config) * tokens * share)}B")
            return PagedEvictionCache(config, int(tokens * share) // 16 * 16, policy=self.name)


def bytes_per_token(config: Any) -> int:
    """Bytes of a token's keys and values in 16 bits."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * width * 2)


# ---- what a cache holds ---------------------------------------------------------------------------------------------


def held_bytes(cache: Any) -> int:
    """Bytes of all tensors that layers of a cache hold, each storage once, whatever they are for."""
    return sum(storage.nbytes() for storage in {part.data_ptr(): part for part in _storages(cache.layers)}.values())


def _storages(root: Any) -> Iterator[torch.UntypedStorage]:
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, str | int | float | type):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            if hasattr(thing, "__tensor_flatten__"):  # of quanto: codes, scales and shifts
                waiting += [getattr(thing, name) for name in thing.__tensor_flatten__()[0]]
            elif thing.device.type != "meta":
                yield thing.untyped_storage()
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple):
            waiting += thing
        elif type(thing).__module__.startswith(("hf_paged_eviction", "transformers.cache_utils")):
            names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting += [getattr(thing, name, None) for name in names]
            waiting += vars(thing).values() if hasattr(thing, "__dict__") else []


def twin(cache: Any) -> Any:
    """A copy to put a question to. The tensors of quanto cannot be copied deeply, and nothing writes into them."""
    if not isinstance(cache, QuantizedCache):
        return copy.deepcopy(cache)
    shallow = copy.copy(cache)
    shallow.layers = [copy.copy(layer) for layer in cache.layers]
    return shallow


# ---- a document and a cache -----------------------------------------------------------------------------------------


class Reader:
    """Reads documents with one model, and asks.

    Args:
        chunk: tokens of a forward while reading; 0 = all in one.
    """

    def __init__(self, model: Any, tokenizer: Any, chunk: int) -> None:
        self.model, self.tokenizer, self.chunk = model, tokenizer, chunk

    def read(self, ids: Tensor, cache: Any) -> tuple[Tensor, Row]:
        """Let a cache read; logits of the next token, and what it cost."""
        most = 0

        def look(*_: Any) -> None:
            nonlocal most
            most = max(most, held_bytes(cache))

        hook = self.model.get_decoder().layers[-1].register_forward_hook(look)
        start = time.process_time()
        try:
            for part in ids.split(self.chunk or ids.shape[1], 1):
                logits = feed(self.model, part, None, cache)
        finally:
            hook.remove()
        seconds = time.process_time() - start
        now = held_bytes(cache)
        stats = cache.stats() if isinstance(cache, PagedEvictionCache) else None
        stored = now if stats is None else stats.storage_bytes + stats.other_bytes
        return logits[:, -1:], {"seconds": seconds, "peak": max(most, now), "bytes": now, "stored": stored}

    def follow(self, ids: Tensor, cache: Any, last: Tensor) -> float:
        """Nats per token on the text that follows."""
        logits = torch.cat([last, feed(self.model, ids[:, :-1], None, twin(cache), keep=0)], 1)
        return -float(logits.log_softmax(-1).gather(-1, ids[..., None]).mean())

    def ask(self, question: Question, cache: Any) -> Row:
        """Whether the answer is right, what it is, and the nats per token of the expected one."""
        front = self._ids(question.ask)
        expected = self._ids(question.answer)
        logits = feed(self.model, torch.cat([front, expected[:, :-1]], 1), None, twin(cache), keep=0)
        likely = logits[:, front.shape[1] - 1 :].log_softmax(-1)
        nats = -float(likely.gather(-1, expected[..., None]).mean())
        chosen = likely.argmax(-1)
        same = int((chosen == expected)[0].long().cumprod(0).sum())
        answer = chosen[:, : same + 1]  # as far as feeding is what generating would have done
        verdict = question.verdict(self._text(answer))
        if verdict is None:
            answer, verdict = self._go_on(question, torch.cat([front, answer], 1), answer, twin(cache))
        return {"right": bool(verdict), "answer": self._text(answer), "nats": round(nats, 4)}

    def _go_on(self, question: Question, ids: Tensor, answer: Tensor, cache: Any) -> tuple[Tensor, bool | None]:
        most = self._ids(question.answer).shape[1] + _LONGER
        verdict = None
        while verdict is None and answer.shape[1] < most:
            ids = feed(self.model, ids, None, cache)[:, -1].argmax(-1, True)
            answer = torch.cat([answer, ids], 1)
            verdict = question.verdict(self._text(answer))
        return answer, verdict

    def _ids(self, text: str) -> Tensor:
        return torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])

    def _text(self, ids: Tensor) -> str:
        return str(self.tokenizer.decode(ids[0], clean_up_tokenization_spaces=False))

    def steps(self, ids: Tensor, cache: Any, first: Tensor) -> Tensor:
        """Log probabilities of each token of an answer that is fed token by token, `[tokens, vocabulary]`."""
        logits = [first[0, -1]]
        for token in ids[0, :-1]:
            logits.append(feed(self.model, token.view(1, 1), None, cache)[0, -1])
        return torch.stack(logits).log_softmax(-1)

    def write(self, cache: Any, first: Tensor) -> tuple[Tensor, Tensor]:
        """The greedy continuation, `[1, _ANSWER]`, and its log probabilities."""
        logits = [first[0, -1]]
        chosen = [first[0, -1].argmax()]
        while len(chosen) < _ANSWER:
            logits.append(feed(self.model, chosen[-1].view(1, 1), None, cache)[0, -1])
            chosen.append(logits[-1].argmax())
        return torch.stack(chosen)[None], torch.stack(logits).log_softmax(-1)


def question_rows(reader: Reader, one: Document, kind: Kind, wanted: set[int] | None) -> Iterator[Row]:
    """Rows of one cache and document.

    Args:
        wanted: questions to ask; None = all.
    """
    cache = kind.make(reader.model.config, one.ids.shape[1])
    last, cost = reader.read(one.ids, cache)
    for number, question in enumerate(one.questions):
        if wanted is None or number in wanted:
            yield {"kind": question.kind, "question": number, **reader.ask(question, cache)}
    yield {"kind": "text", "nats": round(reader.follow(one.following, cache, last), 4)}
    yield {"kind": "read", "tokens": one.ids.shape[1], **{**cost, "seconds": round(cost["seconds"], 2)}}


def answer_rows(reader: Reader, one: Document, kind: Kind, full: list[tuple[Tensor, Tensor]]) -> Iterator[Row]:
    """How far the predictions of a long answer are from the full cache's, in parts.

    Args:
        full: empty, or the full cache's answer with its log probabilities; filled here.
    """
    if not full:
        cache = Kind(FULL).make(reader.model.config, one.ids.shape[1])
        full.append(reader.write(cache, reader.read(one.ids, cache)[0]))
    ids, expected = full[0]
    cache = kind.make(reader.model.config, one.ids.shape[1])
    found = reader.steps(ids, cache, reader.read(one.ids, cache)[0])
    for at in range(0, _ANSWER, _PART):
        theirs, ours = expected[at : at + _PART], found[at : at + _PART]
        far = (theirs.exp() * (theirs - ours)).sum(-1).mean()
        same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
        yield {"kind": "answer", "question": at, "kl": round(float(far), 5), "same": round(float(same), 4)}


# ---- the file -------------------------------------------------------------------------------------------------------


def read_rows(file: Path) -> list[Row]:
    """All rows, without a last line that was cut off."""
    lines = file.read_text("utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append(file: Path, rows: list[Row]) -> None:
    """Write rows in one go."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not (text := file.read_text("utf-8")).endswith("\n") and text:
        file.write_text(text[: text.rfind("\n") + 1], "utf-8")
    with file.open("a", encoding="utf-8") as opened:
        opened.write("".join(json.dumps(row) + "\n" for row in rows))


def _run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    kinds = [Kind(FULL), *(Kind.of(text) for text in options.caches.split(","))]
    if any(kind.name == PREPARED for kind in kinds):
        print(f"profile: {prepare(model, tokenizer).path}", flush=True)
    model.set_attn_implementation("paged_eviction")
    reader = Reader(model, tokenizer, options.chunk)
    append(options.output, [_facts_of_run(options)])
    count = options.answers or options.documents
    started = time.monotonic()
    for index in range(options.first, options.first + count):
        one = document(tokenizer, options.length, index)
        full: list[tuple[Tensor, Tensor]] = []
        for kind in kinds[1:] if options.answers else kinds:
            key = {
                "model": options.name,
                "length": options.length,
                "chunk": options.chunk,
                "document": index,
                "digest": one.digest,
                "cache": kind.name,
                "share": kind.share,
            }
            rows = [row for row in read_rows(options.output) if row.items() >= key.items()]
            if any(row["kind"] == ("answer" if options.answers else "read") for row in rows):
                continue
            wanted = None if kind.name == FULL else _answered(options.output, key)
            with torch.inference_mode():
                found = answer_rows(reader, one, kind, full) if options.answers else None
                made = [{**key, **row} for row in found or question_rows(reader, one, kind, wanted)]
            append(options.output, made)
            right = sum(row.get("right", 0) for row in made)
            print(
                f"{options.name} {options.length}, document {index - options.first + 1} of {count}, "
                f"{kind.name} {kind.share}: {right} right, {time.monotonic() - started:.0f} s",
                flush=True,
            )


def _answered(file: Path, key: Row) -> set[int]:
    """Questions of a document that the full cache answers."""
    of_full = {**key, "cache": FULL, "share": ""}
    return {row["question"] for row in read_rows(file) if row.items() >= of_full.items() and row.get("right")}


def _facts_of_run(options: argparse.Namespace) -> Row:
    """Versions and the commit of what is measured."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    settings = {key: value for key, value in vars(options).items() if key in ("name", "length", "chunk", "caches")}
    return {"kind": "run", "commit": commit, "dtype": "float32", **settings, **timed_on()}


def _table(options: argparse.Namespace) -> None:
    from long_tables import tables

    print(tables(read_rows(options.output)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure what is missing")
    run.add_argument("--model", required=True, help="folder of a model, such as fetch_models.py makes")
    run.add_argument("--name", required=True, help="what rows call the model")
    run.add_argument("--length", type=int, default=2048, help="tokens of a document (default: %(default)s)")
    run.add_argument("--documents", type=int, default=20, help="how many (default: %(default)s)")
    run.add_argument("--first", type=int, default=0, help="index of the first document (default: %(default)s)")
    run.add_argument("--chunk", type=int, default=512, help="tokens read at once; 0 = all (default: %(default)s)")
    run.add_argument(
        "--caches",
        default="prepared@1/4,prepared@1/8,unprepared@1/8,keydiff@1/4,keydiff@1/8,int4",
        help="see above; the full cache is always there (default: %(default)s)",
    )
    run.add_argument(
        "--answers",
        type=int,
        default=0,
        metavar="N",
        help=f"instead of questions: the full cache's own {_ANSWER} next tokens on N documents",
    )
    run.set_defaults(go=_run)
    table = commands.add_parser("table", help="print what there is")
    table.set_defaults(go=_table)
    for command in (run, table):
        command.add_argument("--output", type=Path, default=FILE, help="the rows (default: %(default)s)")
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()

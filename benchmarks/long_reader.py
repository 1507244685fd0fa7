"""How `long_rows.py` and `long_kvpress.py` read a document, ask, and keep rows; without this package."""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from long_documents import Document, Question, document
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, QuantizedCache

FILE = Path(__file__).parent / "results" / "long_rows.jsonl"
FULL = "full"
#: Of weights, keys and values: what these models are published in.
_DTYPE = torch.bfloat16
Row = dict[str, Any]


class Kind(Protocol):
    """A cache that is measured.

    Attributes:
        name: what its rows call it; the full cache is `FULL`.
        share: of the bytes of 16-bit keys and values; "" = the size that it has.
    """

    @property
    def name(self) -> str: ...

    @property
    def share(self) -> str: ...

    def make(self, config: Any, one: Document) -> Any:
        """An empty cache for a document."""

    def reading(self, model: Any) -> AbstractContextManager[Any]:
        """In which the model reads."""


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
        takes = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in takes else "past_key_values"  # of newer and older transformers

    @classmethod
    def of(cls, folder: str, chunk: int) -> Reader:
        """A reader with the model in a folder, in bfloat16, on one thread."""
        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPE).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder), chunk)

    def read(self, one: Document, kind: Kind) -> tuple[Any, Tensor, Row]:
        """A cache that has read, logits of the next token, and what it cost."""
        ids, cache, most = one.ids, kind.make(self.model.config, one), 0

        def look(*_: Any) -> None:
            nonlocal most
            most = max(most, held_bytes(cache))

        hook = self.model.get_decoder().layers[-1].register_forward_hook(look)
        start = time.process_time()
        try:
            with kind.reading(self.model):
                for part in ids.split(self.chunk or ids.shape[1], 1):
                    logits = self.feed(part, cache, 1)
        finally:
            hook.remove()
        seconds, now = time.process_time() - start, held_bytes(cache)
        stats = cache.stats() if hasattr(cache, "stats") else None
        stored = now if stats is None else stats.storage_bytes + stats.other_bytes
        cost = {"seconds": round(seconds, 2), "peak": max(most, now), "bytes": now, "stored": stored}
        return cache, logits, cost

    def feed(self, ids: Tensor, cache: Any, keep: int | Tensor = 0) -> Tensor:
        """Logits in float32 of the last `keep` tokens, 0 = all, or of tokens by index, `[1, tokens, vocabulary]`."""
        given = {self._argument: cache, "use_cache": True, "logits_to_keep": keep}
        logits: Tensor = self.model(input_ids=ids, **given).logits
        return logits.float()

    def follow(self, ids: Tensor, cache: Any, last: Tensor) -> float:
        """Nats per token on the text that follows."""
        logits = torch.cat([last, self.feed(ids[:, :-1], twin(cache))], 1)
        return -float(logits.log_softmax(-1).gather(-1, ids[..., None]).mean())

    def ask(self, question: Question, cache: Any) -> Row:
        """Whether name and number are the first choices, which those are, and the nats per token of both."""
        front = torch.tensor([self._encode(question.ask)["input_ids"]])
        answer = self._encode(question.answer, return_offsets_mapping=True)
        spans = question.found()
        offsets = enumerate(answer["offset_mapping"])
        scored = [at for at, (start, end) in offsets if any(start < last and first < end for first, last in spans)]
        expected = torch.tensor(answer["input_ids"])
        before = torch.tensor(scored) + front.shape[1] - 1
        logits = self.feed(torch.cat([front, expected[None, :-1]], 1), twin(cache), before)
        likely = logits[0].log_softmax(-1)
        chosen, expected = likely.argmax(-1), expected[scored]
        nats = -float(likely.gather(-1, expected[:, None]).mean())
        said = str(self.tokenizer.decode(chosen, clean_up_tokenization_spaces=False))
        return {"right": bool((chosen == expected).all()), "answer": said, "nats": round(nats, 4)}

    def _encode(self, text: str, **options: Any) -> Any:
        return self.tokenizer(text, add_special_tokens=False, **options)


def question_rows(reader: Reader, one: Document, kind: Kind, wanted: set[int] | None) -> Iterator[Row]:
    """Rows of one cache and document.

    Args:
        wanted: questions to ask; None = all.
    """
    cache, last, cost = reader.read(one, kind)
    for number, question in enumerate(one.questions):
        if wanted is None or number in wanted:
            yield {"kind": question.kind, "question": number, **reader.ask(question, cache)}
    yield {"kind": "text", "nats": round(reader.follow(one.following, cache, last), 4)}
    yield {"kind": "read", "tokens": one.ids.shape[1], **cost}


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


def measure(options: argparse.Namespace, reader: Reader, kinds: Iterable[Kind]) -> None:
    """Ask what is missing, and append it.

    Args:
        options: `name`, `length`, `chunk`, `first`, `documents`, `output`.
    """
    started = time.monotonic()
    for index in range(options.first, options.first + options.documents):
        one = document(reader.tokenizer, options.length, index)
        for kind in kinds:
            key, rows = key_of(options, index, one, kind), read_rows(options.output)
            if is_there(rows, key, "read"):
                continue
            wanted = None if kind.name == FULL else _answered(rows, key)
            with torch.inference_mode():
                made = [{**key, **row} for row in question_rows(reader, one, kind, wanted)]
            append(options.output, made)
            right, asked = sum(row.get("right", 0) for row in made), sum("right" in row for row in made)
            print(
                f"{options.name} {options.length}, document {index - options.first + 1} of {options.documents}, "
                f"{kind.name} {kind.share}: {right} of {asked} right, {time.monotonic() - started:.0f} s",
                flush=True,
            )


def key_of(options: argparse.Namespace, index: int, one: Document, kind: Kind) -> Row:
    """What rows of a document and a cache have in common."""
    key = {"model": options.name, "length": options.length, "chunk": options.chunk, "document": index}
    return key | {"digest": one.digest, "cache": kind.name, "share": kind.share}


def is_there(rows: Iterable[Row], key: Row, kind: str) -> bool:
    """Whether rows of a kind are there."""
    return any(row["kind"] == kind and row.items() >= key.items() for row in rows)


def _answered(rows: Iterable[Row], key: Row) -> set[int]:
    """Questions of a document that the full cache answers."""
    of_full = {**key, "cache": FULL, "share": ""}
    return {row["question"] for row in rows if row.get("right") and row.items() >= of_full.items()}


def facts_of_run(options: argparse.Namespace, measured_on: Row) -> Row:
    """Versions and the commit of what is measured."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    settings = {key: value for key, value in vars(options).items() if key in ("name", "length", "chunk", "caches")}
    return {"kind": "run", "commit": commit, "dtype": str(_DTYPE).removeprefix("torch."), **settings, **measured_on}


def add_options(run: argparse.ArgumentParser, caches: str) -> None:
    """What both scripts ask for."""
    run.add_argument("--model", required=True, help="folder of a model, such as fetch_models.py makes")
    run.add_argument("--name", required=True, help="what rows call the model")
    run.add_argument("--length", type=int, default=2048, help="tokens of a document (default: %(default)s)")
    run.add_argument("--documents", type=int, default=20, help="how many (default: %(default)s)")
    run.add_argument("--first", type=int, default=0, help="index of the first document (default: %(default)s)")
    run.add_argument("--caches", default=caches, help="the full cache is always there (default: %(default)s)")
    run.add_argument("--output", type=Path, default=FILE, help="the rows (default: %(default)s)")

"""What caches keep in shares of the memory of 16-bit keys and values: the rows of `benchmarks/memory_rows.py`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache

from common import cell
from measured import RESULTS
from pandas import DataFrame, concat
from real_rows import percent
from writing import listed, table, titled

#: Models, as the pages call them, in the order of tables.
MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "qwen-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct",
    "qwen-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct",
    "gemma3": "Gemma-3-270M",
}
CACHES = {
    "prepared": "after `prepare`",
    "without": "without `prepare`",
    "paged_eviction": "`paged_eviction`, as published",
    "snapkv": "`snapkv`",
    "tova": "`tova`",
    "random": "random eviction",
}
SHARES = {1 / 2: "1/2", 1 / 4: "1/4", 1 / 8: "1/8", 1 / 16: "1/16"}
#: Caches that have all shares, and the shares of the others.
_OURS, _PUBLISHED = ("prepared", "without"), (1 / 4, 1 / 8)
#: Columns of right answers: a use, and whether the prompts are those with three other keys; None = there are none.
_QUESTIONS = {
    "one fact, asked after compression: right, %": ("later", False),
    "asked in the prompt": ("before", False),
    "one of four, after": ("later", True),
    "one of twelve, after": ("twelve", None),
}
#: The task with four keys.
_OF_FOUR = "multikey"
#: Fewer prompts than these make no cell.
_FEWEST = 10


@cache
def rows(model: str) -> DataFrame:
    """The rows of a model, each with the `dtype` that it ran in; none if the model was not measured."""
    frames = [DataFrame(columns=["cache", "use", "share", "bits", "right", "loss", "prompt", "dtype"])]
    for path in sorted((RESULTS / "memory").glob(f"{model}_*.jsonl.gz")):
        facts, *lines = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
        frames.append(DataFrame(lines).assign(dtype=facts["dtype"]))
    return concat(frames, ignore_index=True)


def memory(_: str) -> str:
    """The table of all models: caches at shares of the memory."""
    header = ("model", "cache", "memory", "bits", "text: nats lost", *_QUESTIONS, "of", "dtype")
    return table(header, [line for model, title in MODELS.items() for line in titled(title, _lines(model))])


def _lines(model: str) -> Iterator[list[str]]:
    frame = rows(model)
    for name in CACHES:
        for share in _PUBLISHED if name not in _OURS else SHARES:
            group = group_of(frame, name, share)
            columns = [asked(group, *question) for question in _QUESTIONS.values()]
            cells = [lost(frame, group), *map(right, columns)]
            if any(cells):
                texts = group[group["use"] == "text"]
                counts = ", ".join(str(one["prompt"].nunique()) for one in (texts, *columns))
                dtype = listed([*group["dtype"].unique()])
                yield [CACHES[name], SHARES[share], _bits(group), *cells, counts, dtype]


def group_of(frame: DataFrame, name: str, share: float) -> DataFrame:
    """The rows of a cache; a prompt that was read in two dtypes counts once."""
    group = frame[(frame["cache"] == name) & (frame["share"] == share)]
    return group.sort_values("dtype", kind="stable").drop_duplicates(["use", "prompt"])


def _bits(group: DataFrame) -> str:
    """Bits of a number, where they differ of keys and of values."""
    (chosen,) = {tuple(bits) for bits in group["bits"].dropna()} or {(None, None)}
    keys, values = (bits or 16 for bits in chosen)
    return str(keys) if keys == values else f"{keys}, {values}"


def asked(frame: DataFrame, use: str, of_four: bool | None) -> DataFrame:
    """The rows of one column of right answers."""
    found = frame[frame["use"] == use]
    return found if of_four is None else found[found["prompt"].str.contains(_OF_FOUR) == of_four]


def lost(frame: DataFrame, group: DataFrame) -> str:
    """Nats that running text loses in a group of a model's rows; "" if too few were measured."""
    texts = group[group["use"] == "text"]
    full = frame[frame["cache"] == "full"]
    both = texts.merge(full, on=["use", "prompt", "dtype"], suffixes=("", "_full"))
    return cell(both["loss"] - both["loss_full"], 3) if len(texts) >= _FEWEST else ""


def right(group: DataFrame) -> str:
    """Right answers in percent; a cache that is too small for a share has none. "" if too few were measured."""
    return percent(group["right"].fillna(False).astype(float)) if len(group) >= _FEWEST else ""

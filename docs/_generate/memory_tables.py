"""What caches keep in shares of the memory of 16-bit keys and values: the rows of `benchmarks/memory_rows.py`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from functools import cache

from common import cell
from measured import RESULTS
from pandas import DataFrame, concat
from real_rows import percent
from writing import listed, table

#: Models, as the pages call them.
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
#: Columns of right answers: a use, and whether the prompts are those with three other keys; None = there are none.
_QUESTIONS = {
    "one fact, asked after compression: right, %": ("later", False),
    "asked in the prompt": ("before", False),
    "one of four, after compression": ("later", True),
    "one of twelve, after compression": ("twelve", None),
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


def memory(model: str) -> str:
    """The table of a model: caches at shares of the memory."""
    frame = rows(model)
    header = ("cache", "memory", "bits", "text: nats lost", *_QUESTIONS)
    lines = [["full cache", "1", "16", "0", *("100" for _ in _QUESTIONS)], *_lines(frame, tuple(CACHES))]
    return f"{table(header, lines)}\n\n{_note(MODELS[model], frame)}"


def _lines(frame: DataFrame, caches: Sequence[str]) -> Iterator[list[str]]:
    for name in caches:
        for share, title in SHARES.items():
            group = frame[(frame["cache"] == name) & (frame["share"] == share)]
            cells = [lost(frame, group), *(right(asked(group, *question)) for question in _QUESTIONS.values())]
            if any(cells):
                yield [CACHES[name], title, _bits(group), *cells]


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


def _note(model: str, frame: DataFrame) -> str:
    prepared = frame[frame["cache"] == "prepared"]
    counts = {share: _counts(prepared[prepared["share"] == share]) for share in SHARES}
    one, known, four, twelve, texts = most = max(counts.values())
    fewer = {count: [SHARES[share] for share in counts if counts[share] == count] for count in counts.values()}
    rest = "".join(
        f" At {listed(titles)} of the memory: {listed([*map(str, count)])}."
        for count, titles in fewer.items()
        if any(count) and count != most
    )
    missing = [title for share, title in SHARES.items() if not any(counts[share])]
    without = f" Not measured: {listed(missing)} of the memory." if missing else ""
    usual = (frame if prepared.empty else frame[frame["cache"] != "prepared"])["dtype"].mode()[0]
    also = "".join(f" (after `prepare`{where} in {dtype})" for dtype, where in _elsewhere(prepared, usual))
    return (
        f"{model} in {usual}{also}. Memory: of keys and values in 16 bits. Bits: of a number, or "
        f"of keys and of values. Right answers: of prompts of about 900 tokens that the full cache answers, {one} with "
        f"one fact (asked after compression), {known} (in the prompt), {four} with four keys, {twelve} questions about "
        "one of twelve passkeys. "
        f"Nats: the 128 tokens behind {texts} texts of 896 tokens.{rest}{without}"
    )


def _elsewhere(prepared: DataFrame, usual: str) -> Iterator[tuple[str, str]]:
    """The other dtypes, and the shares that ran in them if not all did."""
    measured = set(prepared["share"])
    for dtype, group in prepared[prepared["dtype"] != usual].groupby("dtype"):
        titles = [title for share, title in SHARES.items() if share in set(group["share"])]
        yield str(dtype), "" if set(group["share"]) == measured else f" at {listed(titles)}"


def _counts(prepared: DataFrame) -> tuple[int, ...]:
    """Prompts of each column of right answers, and texts."""
    prompts = (asked(prepared, *question)["prompt"].nunique() for question in _QUESTIONS.values())
    return (*prompts, prepared[prepared["use"] == "text"]["prompt"].nunique())

"""Rows as runs write them, made up but always the same."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from pandas import isna

from hf_paged_eviction_eval.report.means import Mean
from hf_paged_eviction_eval.report.table import Table

FULL = ("full", "full")
VARIANTS = (FULL, *((policy, budget) for budget in ("256", "1024") for policy in ("paged_eviction", "streaming_llm")))


def make_row(
    task: str, variant: tuple[str, str], index: int, length: int | None = None, **changes: Any
) -> dict[str, Any]:
    """One row; its score and costs follow from the arguments."""
    policy, budget = variant
    rng = Random(f"{task} {policy} {budget} {index} {length}")
    tokens = None if policy == "full" else int(budget) if budget.isdigit() else int((length or 4000) * 0.25)
    score = round(min(1.0, rng.random() * (1.2 if tokens is None else 0.6 + tokens / 4000)), 4)
    row = {
        "task": task,
        "length": length,
        "policy": policy,
        "budget": budget,
        "budget_tokens": tokens,
        "block_size": 16,
        "id": f"{task}/{index}",
        "prompt_tokens": length or 3000 + 100 * index,
        "truncated": length is None and index % 3 == 0,
        "chat": task not in ("trec", "lcc"),
        "prediction": f"answer {index} of {policy} <b>&amp;</b>",
        "answers": [f"gold {index}"],
        "all_classes": None,
        "record_length": None if length else 2500 * (1 + index % 4),
        "metric": "qa_f1",
        "score": score,
        "metadata": {"depth": (index % 11) / 10} if task == "niah" else {},
        "new_tokens": 4 + index % 5,
        "question_aware": True,
        "efficiency": make_efficiency(tokens, length or 4000),
        "agreement": None if policy == "full" else {"identical": score, "kl": (1 - score) / 3},
    }
    return row | changes


def make_efficiency(tokens: int | None, length: int) -> dict[str, Any]:
    """What a batch of two rows cost."""
    held = tokens or length
    return {
        "batch_rows": 2,
        "prefill_seconds": 0.5 + length / 8000,
        "decode_seconds": 0.2 + held / 10000,
        "decode_steps": 20,
        "peak_bytes": 2**30 + 4096 * held,
        "kv_bytes": 2048 * held,
        "evicted_tokens": 0 if tokens is None else 2 * (length - held),
        "shared_prefill": False,
    }


def make_rows(
    tasks: Iterable[str],
    variants: Sequence[tuple[str, str]] = VARIANTS,
    lengths: Sequence[int | None] = (None,),
    count: int = 12,
    **changes: Any,
) -> list[dict[str, Any]]:
    """The product of all of them."""
    return [
        make_row(task, variant, index, length, **changes)
        for task in tasks
        for length in lengths
        for variant in variants
        for index in range(count)
    ]


def write_run(folder: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> Path:
    """A folder of results."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "settings": {"model": "meta/tiny", "dtype": "float32", "block_size": 16, "question_aware": True} | settings,
        "versions": {"torch": "2.9", "transformers": "5.0"},
        "hardware": {"cpu": "a processor"},
    }
    (folder / "run.0.json").write_text(json.dumps(meta | {"digests": {"": "0"}}), "utf-8")
    lines = [json.dumps({**row, "settings": "0"}, ensure_ascii=False) + "\n" for row in rows]
    (folder / "rows.0.jsonl").write_text("".join(lines), "utf-8")
    return folder


def values(table: Table | None) -> list[tuple[Any, ...]]:
    """Names and numbers of each line, without what is known of their errors."""
    assert table is not None
    lines = table.frame.reset_index().astype(object).itertuples(index=False, name=None)
    return [tuple(map(plain, line)) for line in lines]


def plain(value: Any) -> Any:
    """A mean as a number, and None for what is none."""
    value = value.value if isinstance(value, Mean) else value
    return None if isna(value) else value


def cells(table: Table) -> list[list[str]]:
    """The cells of each line, as they are shown."""
    return [list(map(str, line)) for line in table.texts.to_numpy()]


def bold(table: Table | None) -> set[tuple[int, str]]:
    """Number of the line and column of each bold cell."""
    assert table is not None
    lines = enumerate(table.bold.to_numpy())
    return {(at, name) for at, line in lines for name, best in zip(table.frame, line, strict=True) if best}

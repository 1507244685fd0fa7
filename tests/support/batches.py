"""Batches of random tokens, and a tokenizer that shows what was generated."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_paged_eviction_eval.data.prompting.prompts import Batch, Prompt
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.runner import run_batch
from hf_paged_eviction_eval.tasks import Sample

VOCABULARY = 600
NEWLINE = 7


class IdTokenizer:
    """Says its token ids in words, so that no difference is lost."""

    eos_token_id = 1
    all_special_tokens: tuple[str, ...] = ()

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, tokens))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [99, NEWLINE]


def random_ids(length: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())


def make_batch(
    lengths: Sequence[int],
    question: int = 0,
    new_tokens: Sequence[int] = (4, 6, 7),
    length: int | None = None,
    seed: int = 1,
    **sample: Any,
) -> Batch:
    """Prompts of random tokens, the last `question` of which are fed after compression."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for index, count in enumerate(lengths):
        ids = random_ids(count, generator)
        one = Sample(str(index), "passkey", "", "", ("1",), new_tokens[index % len(new_tokens)], **sample)
        prompts.append(Prompt(one, ids[: count - question], ids[count - question :], False, False))
    return Batch("passkey", length, tuple(prompts))


def all_rows(
    model: Any, settings: TaskSettings, batch: Batch, done: Any = (), tokenizer: Any = None
) -> list[dict[str, Any]]:
    groups = run_batch(model, tokenizer or IdTokenizer(), settings, batch, frozenset(done))
    return [row for rows in groups for row in rows]


def said(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], str]:
    """Predictions by policy, budget and sample."""
    return {(row["policy"], row["budget"], row["id"]): row["prediction"] for row in rows}


def without_costs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must not depend on how the rows were computed, in a fixed order."""
    cheap = [{name: value for name, value in row.items() if name != "efficiency"} for row in rows]
    return sorted(cheap, key=lambda row: (row["policy"], row["budget"], row["id"]))

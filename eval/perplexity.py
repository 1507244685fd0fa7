"""How well a text is predicted, by position, while it streams through a cache in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from hf_paged_eviction.integration.feeding import feed

from .errors import RowsFailed, UserError
from .running.memory import free_memory, is_out_of_memory
from .running.prefill import input_device
from .running.variants import Variant, make_cache, variants
from .settings import TextSettings
from .sizes import tokens_held
from .store.results import Row
from .summaries.summary import BINS
from .texts import documents

#: A text must fill one bin at least.
SHORTEST = 32
#: Texts per batch where nobody says; where memory runs out, a batch is halved.
_ROWS = 8


class TextKey(NamedTuple):
    """What a row is about; a run that is continued skips the rows it finds."""

    text: str
    policy: str
    budget: str


@dataclass(frozen=True)
class TextJob:
    """Texts that run together, under one policy and budget.

    Attributes:
        names: one per text.
        tokens: their ids.
        length: tokens of the longest text of the run, what shares refer to.
        variant: policy and budget.
    """

    names: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    length: int
    variant: Variant

    def keys(self) -> list[TextKey]:
        """The rows that it yields, in order."""
        return [TextKey(name, self.variant.policy, self.variant.budget.label) for name in self.names]


def make_text_jobs(settings: TextSettings, tokenizer: Any) -> list[TextJob]:
    """The first `limit` texts that are long enough, cut to `length` tokens, longest first."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for text in documents(settings.files, settings.dataset, settings.dataset_revision):
        if len(found) == settings.limit:
            break
        # Enough characters for the tokens wanted, without encoding whole books.
        ids = tokenizer(text.content[: settings.length * 32], verbose=False)["input_ids"][: settings.length]
        if len(ids) >= SHORTEST:
            found.append((text.name, tuple(ids)))
    if not found:
        source = settings.dataset or ", ".join(settings.files)
        raise UserError(f"no text of at least {SHORTEST} tokens in {source}")
    found.sort(key=lambda item: -len(item[1]))
    length = len(found[0][1])
    size = _ROWS if settings.batch_size == "auto" else settings.batch_size
    groups = [found[at : at + size] for at in range(0, len(found), size)]
    return [
        TextJob(tuple(name for name, _ in group), tuple(ids for _, ids in group), length, variant)
        for group in groups
        for variant in variants(settings)
    ]


@torch.inference_mode()
def token_losses(model: Any, ids: Tensor, cache: DynamicCache, chunk: int) -> Tensor:
    """Negative log-likelihood in nats of every token but the first, `[rows, tokens - 1]`, float32.

    Args:
        ids: `[rows, tokens]`, no left padding.
        cache: empty; what it evicts after one chunk is gone for the next.
        chunk: tokens per forward.
    """
    losses = []
    for start in range(0, ids.shape[1] - 1, chunk):
        stop = min(start + chunk, ids.shape[1] - 1)
        logits = feed(model, ids[:, start:stop], torch.ones_like(ids[:, :stop]), cache, keep=0)
        targets = ids[:, start + 1 : stop + 1]
        losses.append(cross_entropy(logits.float().transpose(1, 2), targets, reduction="none"))
    return torch.cat(losses, dim=1)


def run_texts(
    model: Any, tokenizer: Any, settings: TextSettings, job: TextJob, done: Set[TextKey]
) -> Iterator[list[Row]]:
    """The missing rows of one job. Where memory runs out it is halved.

    Raises:
        RowsFailed: after all other rows, which texts did not fit alone.
    """
    failed: list[TextKey] = []
    reason = ""
    missing = [index for index, key in enumerate(job.keys()) if key not in done]
    waiting = [missing] if missing else []
    while waiting:
        texts = waiting.pop(0)
        try:
            rows: list[Row] | None = _text_rows(model, settings, job, texts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            rows, reason = None, str(error) or type(error).__name__
        if rows is not None:
            yield rows
            continue
        free_memory()
        if len(texts) > 1:
            half = len(texts) // 2
            waiting[:0] = [texts[:half], texts[half:]]
        else:
            failed.append(job.keys()[texts[0]])
    if failed:
        raise RowsFailed(tuple(failed), reason)


def _text_rows(model: Any, settings: TextSettings, job: TextJob, texts: Sequence[int]) -> list[Row]:
    """The rows of some texts of a job, given by their index."""
    chosen = [job.tokens[index] for index in texts]
    # Texts end at different places: padded on the right, where causal attention never looks.
    ids = torch.zeros(len(chosen), max(map(len, chosen)), dtype=torch.int64)
    for line, tokens in zip(ids, chosen, strict=True):
        line[: len(tokens)] = torch.tensor(tokens)
    ids = ids.to(input_device(model))
    held = tokens_held(job.variant.budget, model, settings, job.variant.policy, job.length)
    cache = make_cache(model, settings, job.variant, held, torch.ones_like(ids))
    losses = token_losses(model, ids, cache, settings.chunk).cpu()
    return [
        {
            "text": job.names[index],
            "tokens": len(tokens),
            "length": job.length,
            "policy": job.variant.policy,
            "budget": job.variant.budget.label,
            "budget_tokens": held,
            "block_size": settings.block_size,
            **binned(line[: len(tokens) - 1], job.length),
        }
        for index, tokens, line in zip(texts, chosen, losses, strict=True)
    ]


def binned(losses: Tensor, length: int) -> dict[str, list[float] | list[int]]:
    """Sums and numbers of losses `[tokens - 1]` per position bin; the first one belongs to position 1."""
    positions = torch.arange(1, len(losses) + 1)
    bins = positions * BINS // length
    sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, losses.double())
    return {
        "loss": [round(value, 6) for value in sums.tolist()],
        "count": bins.bincount(minlength=BINS).tolist(),
    }


def text_row_key(row: Row) -> TextKey:
    """The identity of a finished row."""
    return TextKey(*(row[name] for name in TextKey._fields))

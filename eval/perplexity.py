"""How well a text is predicted, by position, while it streams through a cache in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from .errors import UserError
from .results import Row
from .runner import Variant, make_cache, variants
from .settings import TextSettings
from .texts import read_texts

#: Position bins of a run: enough for a curve, few enough to average over.
BINS = 16
#: A text must fill one bin at least.
SHORTEST = 32


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
    """The first `samples` texts that are long enough, cut to `length` tokens, longest first."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for text in read_texts(settings.files):
        if len(found) == settings.samples:
            break
        # Enough characters for the tokens wanted, without encoding whole books.
        ids = tokenizer(text.content[: settings.length * 32], verbose=False)["input_ids"][: settings.length]
        if len(ids) >= SHORTEST:
            found.append((text.name, tuple(ids)))
    if not found:
        raise UserError(f"no text of at least {SHORTEST} tokens in {', '.join(settings.files)}")
    found.sort(key=lambda item: -len(item[1]))
    length, size = len(found[0][1]), settings.batch_size
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
        logits = model(
            input_ids=ids[:, start:stop],
            attention_mask=torch.ones_like(ids[:, :stop]),
            position_ids=torch.arange(start, stop, device=ids.device).expand(len(ids), -1),
            past_key_values=cache,
            use_cache=True,
        ).logits
        targets = ids[:, start + 1 : stop + 1]
        losses.append(cross_entropy(logits.float().transpose(1, 2), targets, reduction="none"))
    return torch.cat(losses, dim=1)


def run_texts(
    model: Any, tokenizer: Any, settings: TextSettings, job: TextJob, done: Set[TextKey]
) -> Iterator[list[Row]]:
    """The missing rows of one job."""
    # Texts end at different places: padded on the right, where causal attention never looks.
    ids = torch.zeros(len(job.tokens), max(map(len, job.tokens)), dtype=torch.int64)
    for row, tokens in zip(ids, job.tokens, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    ids = ids.to(settings.device)
    cache = make_cache(model, settings, job.variant, job.length, torch.ones_like(ids))
    losses = token_losses(model, ids, cache, settings.chunk).cpu()
    yield [
        {
            "text": key.text,
            "tokens": len(tokens),
            "length": job.length,
            "policy": key.policy,
            "budget": key.budget,
            "budget_tokens": job.variant.budget.resolve(job.length, settings.block_size),
            "block_size": settings.block_size,
            **binned(row[: len(tokens) - 1], job.length),
        }
        for key, tokens, row in zip(job.keys(), job.tokens, losses, strict=True)
        if key not in done
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

"""How well a text is predicted, by position, while it streams through a cache in chunks."""

from __future__ import annotations

import time
import warnings
from array import array
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from hf_paged_eviction.integration.feeding import feed
from hf_paged_eviction.integration.window import trained_window

from .encoding import encode
from .errors import RowsFailed, UserError
from .running.memory import free_memory, is_out_of_memory
from .running.prefill import input_device
from .running.variants import Variant, make_cache, variants
from .settings import TextSettings
from .sizes import tokens_held
from .store.results import Row
from .summaries.summary import BINS
from .texts import documents
from .workers import Reading

S = TypeVar("S")
#: A text must fill one bin at least.
SHORTEST = 32
#: Texts per batch where nobody says; where memory runs out, a batch is halved.
_ROWS = 8
#: Seconds between two words on how far a text is.
_TELL_SECONDS = 0.5
#: Warnings of caches that say what was said of the whole run before it began, or that there may be pads.
SAID = "Attention now reaches further|A batch of several rows arrived"


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
        tokens: their ids, in 32 bits each.
        length: tokens of the longest text of the run, what shares refer to.
        variant: policy and budget.
    """

    names: tuple[str, ...]
    tokens: tuple[array[int], ...]
    length: int
    variant: Variant

    def keys(self) -> list[TextKey]:
        """The rows that it yields, in order."""
        return [TextKey(name, self.variant.name, self.variant.budget.label) for name in self.names]

    @property
    def label(self) -> str:
        """What runs, in a line about progress."""
        return f"{self.variant.name} {self.variant.budget.label}"


def make_text_jobs(settings: TextSettings, tokenizer: Any) -> list[TextJob]:
    """The first `limit` texts that are long enough, cut to `length` tokens, longest first."""
    found: list[tuple[str, array[int]]] = []
    for text in documents(settings.files, settings.dataset, settings.dataset_revision):
        if len(found) == settings.limit:
            break
        ids = encode(tokenizer, text.content, settings.length)
        if len(ids) >= SHORTEST:
            found.append((text.name, ids))
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
        for variant in text_variants(settings)
    ]


def text_variants(settings: TextSettings) -> list[Variant]:
    """The full cache if it is asked for, then every policy at every budget, at each of the `positions`."""
    modes = settings.positions.split(",")
    return [
        replace(variant, positions=mode)
        for variant in variants(settings)
        for mode in (modes[:1] if variant.budget.is_full else modes)
    ]


@torch.inference_mode()
def stream_losses(model: Any, ids: Tensor, cache: DynamicCache, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """A text in forwards of `chunk` tokens, of which nothing is kept but the cache.

    Args:
        ids: `[rows, tokens]`, no left padding; on any device.
        cache: empty; what it evicts after one chunk is gone for the next.

    Yields:
        The position of the first token predicted, and negative log-likelihoods in nats from there on, `[rows, chunk]`
        (fewer at the end) float32.
    """
    device = input_device(model)
    for start in range(0, ids.shape[1] - 1, chunk):
        part = ids[:, start : start + chunk + 1].to(device)
        # Without a mask, which would be as long as all of the text so far: there are no pads on the left.
        positions = torch.arange(start, start + part.shape[1] - 1, device=device).expand(len(part), -1)
        logits = feed(model, part[:, :-1], None, cache, positions=positions, keep=0)
        yield start + 1, cross_entropy(logits.float().transpose(1, 2), part[:, 1:], reduction="none")


def token_losses(model: Any, ids: Tensor, cache: DynamicCache, chunk: int) -> Tensor:
    """Negative log-likelihood in nats of every token but the first, `[rows, tokens - 1]`, float32.

    Args:
        ids: `[rows, tokens]`, no left padding.
        cache: empty; what it evicts after one chunk is gone for the next.
        chunk: tokens per forward.
    """
    return torch.cat([losses for _, losses in stream_losses(model, ids, cache, chunk)], dim=1)


def run_texts(
    model: Any, tokenizer: Any, settings: TextSettings, job: TextJob, done: Set[TextKey]
) -> Iterator[Reading | list[Row]]:
    """The missing rows of one job, and now and then how far it is. Where memory runs out it is halved.

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
            yield from _text_rows(model, settings, job, texts)
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error) or type(error).__name__
        free_memory()
        if len(texts) > 1:
            half = len(texts) // 2
            waiting[:0] = [texts[:half], texts[half:]]
        else:
            failed.append(job.keys()[texts[0]])
    if failed:
        raise RowsFailed(tuple(failed), reason)


def _text_rows(model: Any, settings: TextSettings, job: TextJob, texts: Sequence[int]) -> Iterator[Reading | list[Row]]:
    """How far some texts of a job are, given by their index, and at the end their rows."""
    chosen = [job.tokens[index] for index in texts]
    # Texts end at different places: padded on the right, where causal attention never looks.
    ids = torch.zeros(len(chosen), max(map(len, chosen)), dtype=torch.int64)
    for line, tokens in zip(ids, chosen, strict=True):
        line[: len(tokens)] = torch.tensor(tokens)
    held = tokens_held(job.variant.budget, model, settings, job.variant.policy, job.length)
    cache = make_cache(model, settings, job.variant, held, None)
    bins = [Bins(job.length) for _ in chosen]
    told = time.monotonic()
    for start, losses in _quietly(model, stream_losses(model, ids, cache, settings.chunk)):
        for mine, tokens, line in zip(bins, chosen, losses.cpu(), strict=True):
            mine.add(line[: max(len(tokens) - start, 0)], start)
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            keys = job.keys()
            yield Reading(tuple(keys[index] for index in texts), start + losses.shape[1], ids.shape[1], job.label)
    yield [
        {
            "text": job.names[index],
            "tokens": len(tokens),
            "length": job.length,
            "policy": job.variant.name,
            "budget": job.variant.budget.label,
            "budget_tokens": held,
            "block_size": settings.block_size,
            **mine.as_row(),
        }
        for index, tokens, mine in zip(texts, chosen, bins, strict=True)
    ]


def _quietly(model: Any, stream: Iterator[S]) -> Iterator[S]:
    """The same without `SAID`; a text that a table of positions is too short for is a mistake of the user."""
    try:
        while True:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=SAID)
                try:
                    found = next(stream)
                except StopIteration:
                    return
            yield found
    except IndexError as error:  # positions are looked up in a table
        raise UserError(
            f"this {model.config.model_type} model has no position for so long a text ({error}): choose a --length of "
            f"at most {trained_window(model.config)}"
        ) from error


class Bins:
    """Sums and numbers of losses per position bin of a text of `length` tokens, however long it is."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._loss = torch.zeros(BINS, dtype=torch.float64)
        self._count = torch.zeros(BINS, dtype=torch.int64)

    def add(self, losses: Tensor, start: int) -> None:
        """Take in losses `[tokens]`, the first of them at position `start`."""
        bins = torch.arange(start, start + len(losses)) * BINS // self._length
        self._loss.index_add_(0, bins, losses.double())
        self._count += bins.bincount(minlength=BINS)

    def as_row(self) -> Row:
        """Both as a part of a row."""
        return {"loss": [round(value, 6) for value in self._loss.tolist()], "count": self._count.tolist()}


def text_row_key(row: Row) -> TextKey:
    """The identity of a finished row."""
    return TextKey(*(row[name] for name in TextKey._fields))

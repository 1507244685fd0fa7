"""How well a text is predicted, by position, while it streams through a cache in chunks."""

from __future__ import annotations

import time
import warnings
from array import array
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from hf_paged_eviction.internals import feed, trained_window

from ..caches.sizes import tokens_held
from ..data.texts import read_dataset, read_texts
from ..errors import UserError
from ..models.device import input_device
from ..options.settings import TextSettings
from ..progress import Reading, tell
from ..store.checks import BINS, TextKey, row_key
from ..store.results import Row
from .agreement import divergence
from .memory import halves, within_memory
from .variants import Variant, make_cache, variants

#: A variant, and the indices of texts that it reads together.
_Texts = tuple[Variant, Sequence[int]]
#: A text must fill one bin at least.
SHORTEST = 32
#: Texts per batch where nobody says; where memory runs out, a batch is halved.
_ROWS = 8
#: Seconds between two words on how far a text is.
_TELL_SECONDS = 0.5
#: Warnings of caches that say what was said of the whole run before it began, or that there may be pads.
SAID = "Attention now reaches further|A batch of several rows arrived"


@dataclass(frozen=True)
class TextJob:
    """Texts that run together, under some policies and budgets one after the other.

    Attributes:
        names: one per text.
        tokens: their ids, in 32 bits each.
        length: tokens of the longest text of the run; shares of budgets refer to it.
        variants: policies and budgets.
    """

    names: tuple[str, ...]
    tokens: tuple[array[int], ...]
    length: int
    variants: tuple[Variant, ...]

    def keys(self) -> list[TextKey]:
        """The rows that it yields, in order."""
        return [self.key(variant, index) for variant in self.variants for index in range(len(self.names))]

    def key(self, variant: Variant, index: int) -> TextKey:
        """The row of one text, given by its index."""
        return TextKey(self.names[index], variant.name, variant.budget.label)


def make_text_jobs(settings: TextSettings, tokenizer: Any) -> list[TextJob]:
    """The first `limit` texts that are long enough, cut to `length` tokens, longest first."""
    encoded: list[tuple[str, array[int]]] = []
    dataset = settings.dataset and read_dataset(settings.dataset, settings.dataset_revision)
    for text in dataset or read_texts(settings.files):
        if len(encoded) == settings.limit:
            break
        # Enough characters for the tokens wanted, without encoding whole books.
        beginning = text.content[: settings.length * 32]
        ids = array("i", tokenizer(beginning, verbose=False)["input_ids"][: settings.length])
        if len(ids) >= SHORTEST:
            encoded.append((text.name, ids))
    if not encoded:
        source = settings.dataset or ", ".join(settings.files)
        raise UserError(f"no text of at least {SHORTEST} tokens in {source}")
    encoded.sort(key=lambda item: -len(item[1]))
    length = len(encoded[0][1])
    # To be compared with, all that the full cache says of a text is kept: so many numbers per token as there are words.
    size = settings.batch_size or (1 if settings.agreement else _ROWS)
    groups = [encoded[at : at + size] for at in range(0, len(encoded), size)]
    listed = text_variants(settings)
    return [
        TextJob(tuple(name for name, _ in group), tuple(ids for _, ids in group), length, variants)
        for group in groups
        for variants in ([tuple(listed)] if settings.agreement else [(variant,) for variant in listed])
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
def stream_logits(model: Any, ids: Tensor, cache: DynamicCache, chunk: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """A text in forwards of `chunk` tokens, of which nothing is kept but the cache.

    Args:
        ids: `[rows, tokens]`, no left padding; on any device.
        cache: empty; what it evicts after one chunk is gone for the next.

    Yields:
        The position of the first token predicted; logits `[rows, chunk, vocabulary]` of the tokens from there on (fewer
        at the end), in the model's precision; and these tokens, `[rows, chunk]`.
    """
    device = input_device(model)
    for start in range(0, ids.shape[1] - 1, chunk):
        part = ids[:, start : start + chunk + 1].to(device)
        # Without a mask, which would be as long as all of the text so far: there are no pads on the left.
        positions = torch.arange(start, start + part.shape[1] - 1, device=device).expand(len(part), -1)
        yield start + 1, feed(model, part[:, :-1], None, cache, positions=positions, keep=0), part[:, 1:]


def losses_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Negative log-likelihoods in nats of tokens `[rows, n]`, float32, from logits `[rows, n, vocabulary]`."""
    return cross_entropy(logits.float().transpose(1, 2), tokens, reduction="none")


def run_texts(
    model: Any, tokenizer: Any, settings: TextSettings, job: TextJob, done: Set[TextKey]
) -> Iterator[list[Row]]:
    """The missing rows of one job. Where memory runs out it is halved.

    Raises:
        RowsFailed: after all other rows, which texts did not fit alone.
    """
    beside = Beside() if settings.agreement else None

    def results(piece: _Texts) -> Iterator[list[Row]]:
        rows = _text_rows(model, settings, job, *piece, beside)
        yield [row for row in rows if row_key(row) not in done]

    def smaller(piece: _Texts) -> tuple[list[_Texts], list[TextKey]]:
        variant, texts = piece
        if len(texts) > 1:
            return [(variant, half) for half in halves(texts)], []
        return [], [job.key(variant, texts[0])]

    missing = [(variant, texts) for variant in job.variants if (texts := _missing(job, variant, settings, done))]
    return within_memory(missing, results, smaller)


def _missing(job: TextJob, variant: Variant, settings: TextSettings, done: Set[TextKey]) -> Sequence[int]:
    """Texts that a variant has to read; the full cache also those that others are compared on."""
    compared = (job.variants if settings.agreement and variant.budget.is_full else ()) or (variant,)
    return [i for i in range(len(job.names)) if any(job.key(other, i) not in done for other in compared)]


class Beside:
    """What the full cache said of the texts of one job."""

    def __init__(self) -> None:
        self._logits: dict[tuple[int, int], Tensor] = {}

    def kept(self, texts: Sequence[int], start: int, logits: Tensor) -> Tensor:
        """Keep logits `[rows, n, vocabulary]` of these texts from a position on; no divergence, `[rows, n]`."""
        self._logits |= {(text, start): row for text, row in zip(texts, logits.cpu(), strict=True)}
        return torch.zeros(logits.shape[:2])

    def divergence(self, texts: Sequence[int], start: int, logits: Tensor) -> Tensor:
        """KL divergence in nats, `[rows, n]` float32, of another cache's from what was kept."""
        full = torch.stack([self._logits[text, start] for text in texts]).to(logits.device)
        return divergence(full.flatten(0, 1), logits.flatten(0, 1)).view(logits.shape[:2])


def _text_rows(
    model: Any, settings: TextSettings, job: TextJob, variant: Variant, texts: Sequence[int], beside: Beside | None
) -> list[Row]:
    """The rows of some texts of a job, given by their index."""
    chosen = [job.tokens[index] for index in texts]
    # Texts end at different places: padded on the right, where causal attention never looks.
    ids = torch.zeros(len(chosen), max(map(len, chosen)), dtype=torch.int64)
    for line, tokens in zip(ids, chosen, strict=True):
        line[: len(tokens)] = torch.tensor(tokens)
    held = tokens_held(variant.budget, model, settings, variant.policy, job.length)
    cache = make_cache(model, settings, variant, held, job.length, None)
    losses, divergences = list[Tensor](), list[Tensor]()
    last_tick = time.monotonic()
    with _quietly(model):
        for start, logits, targets in stream_logits(model, ids, cache, settings.chunk):
            losses.append(losses_of(logits, targets).cpu())
            if beside is not None:
                compare = beside.kept if variant.budget.is_full else beside.divergence
                divergences.append(compare(texts, start, logits).cpu())
            if time.monotonic() - last_tick > _TELL_SECONDS:
                last_tick = time.monotonic()
                keys = tuple(job.key(variant, index) for index in texts)
                tell(Reading(keys, start + targets.shape[1], ids.shape[1], f"{variant.name} {variant.budget.label}"))
    loss, rows = torch.cat(losses, 1), []
    for line, (index, tokens) in enumerate(zip(texts, chosen, strict=True)):
        sums, counts = binned(loss[line, : len(tokens) - 1], job.length)
        row = {
            "text": job.names[index],
            "tokens": len(tokens),
            "length": job.length,
            "policy": variant.name,
            "budget": variant.budget.label,
            "budget_tokens": held,
            "block_size": variant.block_size(settings),
            "loss": sums,
            "count": counts,
        }
        if divergences:
            row["kl"], _ = binned(torch.cat(divergences, 1)[line, : len(tokens) - 1], job.length)
        rows.append(row)
    return rows


@contextmanager
def _quietly(model: Any) -> Iterator[None]:
    """Within, nothing of `SAID`; a text that a table of positions is too short for is a mistake of the user."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=SAID)
            yield
    except IndexError as error:  # positions are looked up in a table
        raise UserError(
            f"this {model.config.model_type} model has no position for so long a text ({error}): choose a --length of "
            f"at most {trained_window(model.config)}"
        ) from error


def binned(values: Tensor, length: int) -> tuple[list[float], list[int]]:
    """Sums and numbers of values `[tokens]`, the first of them at position 1, per position bin of `length` tokens."""
    bins = torch.arange(1, len(values) + 1) * BINS // length
    sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, values.double())
    return [round(value, 6) for value in sums.tolist()], bins.bincount(minlength=BINS).tolist()

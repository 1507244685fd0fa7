"""All missing rows of one batch: every prompt under every policy and budget, within the memory there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..caches.budgets import budgets_of
from ..data.prompting.prompts import Batch
from ..errors import UserError
from ..grouping import grouped
from ..options.settings import TaskSettings
from ..store.checks import RowKey, row_key
from ..store.results import Row
from .memory import halves, within_memory
from .part import Part
from .variants import variants


def run_batch(
    model: Any, tokenizer: Any, settings: TaskSettings, batch: Batch, done: Set[RowKey]
) -> Iterator[list[Row]]:
    """The rows of one batch that are not `done`, in groups as they are finished.

    Where memory runs out the batch is halved; rows that were finished before stay finished. A prompt that does not
    fit alone is read again for every cache, and what still does not fit is left out.

    Raises:
        UserError: at once, agreement is asked for without the full cache.
        RowsFailed: after all other rows, which ones did not fit.
    """
    if settings.agreement and not any(budget.is_full for budget in budgets_of(settings)):
        raise UserError(
            f"agreement compares with the full cache, but --budgets is {', '.join(settings.budgets)}: add full to it"
        )
    return _within_memory(model, tokenizer, settings, batch, set(done))


@dataclass
class _Piece:
    """Some prompts of a batch.

    Attributes:
        rows: their indices.
        share: whether one reading of the prompts may serve all caches; after a try, whether it did.
        running: the rows that were being worked on.
    """

    rows: Sequence[int]
    share: bool
    running: Sequence[RowKey] = ()


def _within_memory(
    model: Any, tokenizer: Any, settings: TaskSettings, batch: Batch, done: set[RowKey]
) -> Iterator[list[Row]]:
    def results(piece: _Piece) -> Iterator[list[Row]]:
        keys = (variant.key(batch, batch.prompts[row]) for variant in variants(settings) for row in piece.rows)
        piece.running = [key for key in keys if key not in done]
        part = Part(model, tokenizer, settings, batch, piece.rows, done, piece.share)
        try:
            for rows in part.results():
                done.update(map(row_key, rows))
                yield rows
        finally:
            piece.share, piece.running = part.shared, part.running

    def smaller(piece: _Piece) -> tuple[list[_Piece], Sequence[RowKey]]:
        if len(piece.rows) > 1:
            return [_Piece(rows, settings.share_prefill) for rows in halves(piece.rows)], ()
        given_up = () if piece.share else piece.running
        done.update(given_up)
        return [_Piece(piece.rows, False)], given_up

    return within_memory([_Piece(rows, settings.share_prefill) for rows in _by_stop_rule(batch)], results, smaller)


def _by_stop_rule(batch: Batch) -> list[tuple[int, ...]]:
    """Indices of the prompts that may run together."""
    rows = range(len(batch.prompts))
    groups = grouped(rows, lambda row: batch.prompts[row].sample.stop_at_newline)
    return [tuple(members) for members in groups.values()]

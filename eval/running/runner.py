"""All missing rows of one batch: every prompt under every policy and budget, within the memory there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

from ..data.prompting.prompts import Batch
from ..grouping import grouped
from ..options.settings import TaskSettings
from ..store.checks import RowKey, row_key
from ..store.results import Row
from .memory import halves, within_memory
from .part import Part


def run_batch(
    model: Any, tokenizer: Any, settings: TaskSettings, batch: Batch, done: Set[RowKey]
) -> Iterator[list[Row]]:
    """The rows of one batch that are not `done`, in groups as they are finished.

    If memory runs out, the batch is halved; finished rows stay finished. A prompt that does not fit alone is read by
    each cache separately; what still does not fit is left out.

    Raises:
        RowsFailed: after all other rows, which ones did not fit.
    """
    finished = set(done)

    def part(rows: Sequence[int], share: bool) -> Part:
        return Part(model, tokenizer, settings, batch, rows, finished, share)

    def results(piece: Part) -> Iterator[list[Row]]:
        for rows in piece.results():
            finished.update(map(row_key, rows))
            yield rows

    def smaller(piece: Part) -> tuple[list[Part], Sequence[RowKey]]:
        if len(piece.rows) > 1:
            return [part(rows, settings.share_prefill) for rows in halves(piece.rows)], ()
        given_up = () if piece.shared else piece.running
        finished.update(given_up)
        return [part(piece.rows, False)], given_up

    stop_rules = grouped(range(len(batch.prompts)), lambda row: batch.prompts[row].sample.stop_at_newline)
    return within_memory([part(rows, settings.share_prefill) for rows in stop_rules.values()], results, smaller)

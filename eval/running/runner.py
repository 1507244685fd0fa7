"""All missing rows of one batch: every prompt under every policy and budget, within the memory there is."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from ..caches.budgets import budgets_of
from ..data.prompting.prompts import Batch
from ..errors import RowsFailed, UserError
from ..grouping import grouped
from ..options.settings import TaskSettings
from ..store.results import Row
from .memory import free_memory, is_out_of_memory
from .part import Part
from .variants import RowKey, batch_keys, row_key

__all__ = ["RowKey", "batch_keys", "row_key", "run_batch"]


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


def _within_memory(
    model: Any, tokenizer: Any, settings: TaskSettings, batch: Batch, done: set[RowKey]
) -> Iterator[list[Row]]:
    failed: list[RowKey] = []
    reason = ""
    waiting = [(rows, settings.share_prefill) for rows in _by_stop_rule(batch)]
    while waiting:
        rows, share = waiting.pop(0)
        part = Part(model, tokenizer, settings, batch, rows, done, share)
        problem = None
        try:
            for found in part.results():
                done.update(map(row_key, found))
                yield found
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error) or type(error).__name__
        if problem is not None:
            shared, running = part.shared, part.running
            # What was allocated hangs on the part and, until here, on the error.
            del part
            free_memory()
            if len(rows) > 1:
                half = len(rows) // 2
                waiting[:0] = [(rows[:half], share), (rows[half:], share)]
            elif shared:
                waiting.insert(0, (rows, False))
            else:
                failed += running
                done.update(running)
                reason = problem
                waiting.insert(0, (rows, False))
    if failed:
        raise RowsFailed(tuple(failed), reason)


def _by_stop_rule(batch: Batch) -> list[tuple[int, ...]]:
    """Indices of the prompts that may run together."""
    rows = range(len(batch.prompts))
    groups = grouped(rows, lambda row: batch.prompts[row].sample.stop_at_newline)
    return [tuple(members) for members in groups.values()]

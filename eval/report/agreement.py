"""How far answers are from those of the full cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..store.results import Row
from ..store.summaries.summary import mean_of
from ..store.summaries.table import Column, Spread, Table, Value
from .runs import Run, Variant
from .scores import Line, lines_of, table_of_lines


@dataclass(frozen=True)
class Agreement:
    """Means over answers.

    Attributes:
        identical: percent of the tokens that the full cache gives too.
        kl: nats per token, of the next-token distributions while the full cache's answer is fed.
        answers: that were compared.
    """

    identical: Spread | None
    kl: Spread | None
    answers: int


def agreement_of(rows: Iterable[Row]) -> Agreement | None:
    """None if no answer was compared."""
    found = [row["agreement"] for row in rows if row.get("agreement")]
    identical = mean_of((one.get("identical") for one in found), 100)
    return Agreement(identical, mean_of(one.get("kl") for one in found), len(found)) if found else None


def agreement_at(run: Run, variant: Variant) -> Agreement | None:
    """Over all answers of a policy and budget."""
    return agreement_of(run.answers(variant))


def agreement_table(runs: Sequence[Run]) -> Table | None:
    """One row per policy and budget, over all tasks."""
    columns = [Column("identical tokens (%)", 1), Column("KL (nats)", 4), Column("answers compared")]

    def values(line: Line) -> list[Value]:
        found = agreement_at(line.run, line.variant)
        if found is None:
            return []
        return [found.identical, found.kl, found.answers]

    def behind(line: Line, at: int) -> list[Row]:
        return [row for row in line.run.answers(line.variant) if row.get("agreement")] if at < 2 else []

    title = "Agreement with the full cache"
    return table_of_lines("agreement", title, lines_of(runs), columns, values, best=[0], behind=behind)

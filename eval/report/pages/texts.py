"""Perplexities of runs over texts."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame, concat

from ...caches.budgets import FULL
from ...tables.means import Mean, curves
from ...tables.table import Table
from ..runs import LINE, Run, line_table, lines_of, of_full


def text_table(runs: Sequence[Run]) -> Table | None:
    """Perplexity of every policy at every budget."""
    table = concat([curves(run.texts).assign(run=run.label) for run in runs]).set_index(list(LINE))
    full = of_full(table["perplexity"])
    more = [
        None if run not in full or policy == FULL else Mean(100 * (one.value / full[run].value - 1), held=one.held)
        for (run, _, policy), one in table["perplexity"].items()
    ]
    shown = DataFrame(
        {
            "budget in tokens": table["tokens"],
            "perplexity": table["perplexity"],
            "against the full cache (%)": more,
            "predicted tokens": table["predicted"],
        },
        dtype=object,
    )
    title, digits = "Perplexity: lower is better", {"against the full cache (%)": 1}
    return line_table("perplexity", title, shown, lines_of(runs), digits=digits, best=["perplexity"], lowest=True)

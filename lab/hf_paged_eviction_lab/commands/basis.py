"""Fit a basis to a model: what `paged-eviction fit-basis` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from hf_paged_eviction_eval.console import say, token_bar
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.files import check_output
from hf_paged_eviction_eval.options.settings import TextSettings
from hf_paged_eviction_eval.tables.table import Table, simple_table
from hf_paged_eviction_eval.tables.terminal import to_terminal

from ..low_rank.basis import Basis, save_basis
from ..low_rank.fit import Sums, Worth, add_windows, solve
from .reading import read_windows


def run_fit_basis(settings: TextSettings, output: Path, tokens: int) -> Basis:
    """Fit a basis to some texts, write the file, and print what its directions are worth.

    Args:
        settings: model, device and texts; `length` is that of a window.
        output: the file to write, `*.safetensors`.
        tokens: how many to read, in all.

    Raises:
        UserError: the output cannot be written, the texts are too short, or the model has no use for a basis.
    """
    notes = Console(stderr=True)
    check_output(output, "a basis")
    model, windows = read_windows(settings, tokens)
    sums: dict[int, Sums] = {}
    try:
        with token_bar(notes) as bar:
            task = bar.add_task("reading", total=sum(window.count for window in windows))
            add_windows(model, windows, sums, lambda count: bar.advance(task, count))
        basis, worth = solve(sums, model)
    except ValueError as error:
        raise UserError(f"cannot fit a basis to {settings.model!r}: {error}") from error
    save_basis(basis, output)
    Console().print(to_terminal(report_table(worth)))
    read_all = f"{basis.facts['tokens']} tokens in {len(windows)} windows"
    say(notes, f"{read_all}; written to {output}: bits='low_rank:{output}(rank=R)'")
    return basis


def report_table(worth: Mapping[int, Worth]) -> Table:
    """Per layer, what the first directions hold."""
    dim = len(next(iter(worth.values())).keys)
    ranks = [dim // 4, dim // 2, 3 * dim // 4]
    titles = {
        "keys": "products of keys and queries",
        "rotated": "keys alone",
        "plain": "keys before rotation",
        "values": "values",
    }
    rows = (
        (index, title, *(f"{100 * float(getattr(of, name)[rank - 1]):.1f} %" for rank in ranks))
        for index, of in sorted(worth.items())
        for name, title in titles.items()
    )
    names = ("layer", "variance of", *(f"rank {rank}" for rank in ranks))
    title = "Share of the variance that the first directions hold, mean of the KV heads"
    return simple_table(title, names, rows, head=2)

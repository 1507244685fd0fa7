"""Fit the kernels of `disposal="fold:FILE"`: what `paged-eviction fit-fold` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hf_paged_eviction import make_policy
from hf_paged_eviction_eval.console import say, token_bar
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.files import check_output
from hf_paged_eviction_eval.options.settings import TextSettings
from hf_paged_eviction_eval.tables.table import Table, simple_table
from hf_paged_eviction_eval.tables.terminal import to_terminal

from ..fold import Kernels, save_kernels
from ..fold.fit import (
    FittedLayer,
    Plan,
    fit_layers,
    make_kernels,
    paged_indices,
    plan_facts,
    units,
)
from ..fold.lessons import Eviction
from .fold_options import FoldOptions
from .reading import read_windows


def make_plan(options: FoldOptions) -> Plan:
    """What is fitted.

    Raises:
        UserError: there is no such policy, or a budget is no number.
    """
    try:
        policy = make_policy(options.policy).label
        budgets = tuple(int(part) for part in str(options.budgets).split(","))
    except ValueError as error:
        raise UserError(f"--policy {options.policy!r}, --budgets {options.budgets!r}: {error}") from error
    eviction = Eviction(policy, options.heads, budgets, options.block_size)
    return Plan(eviction, options.rank, options.middle, options.epochs, at_once=options.layers_at_once)


def run_fit_fold(settings: TextSettings, output: Path, tokens: int, plan: Plan) -> Kernels:
    """Fit kernels to a model on some texts, write the file, and print what is left of the error of plain dropping.

    Args:
        settings: model, device and texts; `length` is that of a window.
        output: the file to write, `*.safetensors`.
        tokens: how many to read, in all.

    Raises:
        UserError: the output cannot be written, the texts are too short, or the model or the budgets cannot be used.
    """
    notes = Console(stderr=True)
    check_output(output)
    model, read = read_windows(settings, tokens)
    windows = [window.tokens for window in read]
    try:
        layers = paged_indices(model)
        with token_bar(notes, "steps") as bar:
            task = bar.add_task("reading", total=units(plan, len(layers), len(windows)))

            def advance(what: str) -> None:
                bar.update(task, advance=1, description=what)

            fitted = list(fit_layers(model, windows, plan, layers, advance))
    except ValueError as error:
        raise UserError(f"cannot fit kernels to {settings.model!r}: {error}") from error
    facts = plan_facts(plan, windows)
    kernels = make_kernels(model, plan.eviction.policy, fitted, facts)
    save_kernels(kernels, output)
    Console().print(to_terminal(report_table(fitted)))
    say(
        notes,
        f"{facts['tokens']} tokens in {len(windows)} windows; written to {output}: --policies {plan.eviction.policy} "
        f"--disposal fold:{output}",
    )
    return kernels


def report_table(fitted: Sequence[FittedLayer]) -> Table:
    """Per layer, the squared error of attention in windows that were held out."""
    rows = (
        (
            layer.index,
            f"{layer.dropped:.4f}",
            f"{layer.folded:.4f}",
            f"{layer.folded / layer.dropped:.0%}" if layer.dropped else "",
        )
        for layer in sorted(fitted, key=lambda layer: layer.index)
    )
    title = "Error of attention on text that was held out, as a share of its square"
    return simple_table(title, ("layer", "dropping", "folding", "left of it"), rows)

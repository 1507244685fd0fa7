"""Fit the kernels of `disposal="fold:FILE"`: what `paged-eviction fit-fold` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from hf_paged_eviction import make_policy
from hf_paged_eviction_eval.caches.fitting.reading import check_output, read_windows, token_bar
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.settings import TextSettings
from hf_paged_eviction_eval.running.terminal import say
from hf_paged_eviction_eval.store.summaries.table import Table, simple_table
from hf_paged_eviction_eval.store.summaries.terminal import to_terminal

from ..fold import Kernels, load_kernels, save_kernels
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

    After each layer what is done is written to `output` with `.partial` behind its name. A call with the same settings
    goes on behind that, and ends with the same kernels.

    Args:
        settings: model, device and texts; `length` is that of a window.
        output: the file to write, `*.safetensors`.
        tokens: how many to read, in all.

    Raises:
        UserError: the output cannot be written, the texts are too short, the model or the budgets cannot be used, or
            there is a `.partial` of other settings.
    """
    notes = Console(stderr=True)
    check_output(output)
    model, found = read_windows(settings, tokens)
    windows = [window.tokens for window in found]
    partial = output.with_name(f"{output.name}.partial")
    try:
        layers = paged_indices(model)
        facts = plan_facts(plan, windows)
        done = read_partial(partial, model, plan, facts)
        if done:
            notes.print(f"going on behind {len(done)} of {len(layers)} layers in {partial}", highlight=False)
        left = [index for index in layers if index not in {each.index for each in done}]
        with token_bar(notes, "steps") as bar:
            task = bar.add_task("reading", total=units(plan, len(left), len(windows)))

            def advance(what: str) -> None:
                bar.update(task, advance=1, description=what)

            for each in fit_layers(model, windows, plan, left, advance):
                done.append(each)
                write(make_kernels(model, plan.eviction.policy, done, facts, half=False), partial)
    except ValueError as error:
        raise UserError(f"cannot fit kernels to {settings.model!r}: {error}") from error
    kernels = make_kernels(model, plan.eviction.policy, done, facts)
    write(kernels, output)
    partial.unlink(missing_ok=True)
    Console().print(to_terminal(report_table(done)))
    say(
        notes,
        f"{facts['tokens']} tokens in {len(windows)} windows; written to {output}: --policies {plan.eviction.policy} "
        f"--disposal fold:{output}",
    )
    return kernels


def write(kernels: Kernels, path: Path) -> None:
    """Write a file that is there as a whole or not at all."""
    beside = path.with_name(f"{path.name}.writing")
    save_kernels(kernels, beside)
    beside.replace(path)


def read_partial(path: Path, model: torch.nn.Module, plan: Plan, facts: dict[str, str]) -> list[FittedLayer]:
    """The layers that an earlier call has finished.

    Raises:
        UserError: that call had other settings.
    """
    if not path.is_file():
        return []
    kernels = load_kernels(path)
    errors = json.loads(kernels.facts["held_out_error"])
    before = {name: value for name, value in kernels.facts.items() if name != "held_out_error"}
    different = [f"{name} {before.get(name)}, now {facts[name]}" for name in facts if facts[name] != before.get(name)]
    try:
        kernels.check(model.config, plan.eviction.policy)
    except ValueError as error:
        different.append(str(error))
    if different:
        raise UserError(
            f"{path} was begun with other settings: {'; '.join(different)}. Use those, or delete the file and begin "
            "anew."
        )
    return [FittedLayer(index, layer, *errors[str(index)]) for index, layer in kernels.layers.items()]


def report_table(fitted: Sequence[FittedLayer]) -> Table:
    """Per layer, the squared error of attention in windows that were held out."""
    rows = (
        (
            each.index,
            f"{each.dropped:.4f}",
            f"{each.folded:.4f}",
            f"{each.folded / each.dropped:.0%}" if each.dropped else "",
        )
        for each in sorted(fitted, key=lambda each: each.index)
    )
    title = "Error of attention on text that was held out, as a share of its square"
    return simple_table(title, ("layer", "dropping", "folding", "left of it"), rows)

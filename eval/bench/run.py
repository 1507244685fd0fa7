"""A whole benchmark: measured group by group, each written as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..models.environment import commit, hardware, model_facts, versions
from ..progress import Progress, Watch
from ..store.results import SUMMARY, ResultFolder, Row, settings_differences, write_json
from .decoding import Group, decode_keys
from .methods import FULL
from .prefill import Case, cases, measure_prefill, read_prompt
from .rows import DECODE, PREFILL, THROUGHPUT, BenchKey, row_key
from .settings import BenchSettings
from .shapes import make_model
from .steps import copy_bandwidth
from .throughput import measure_throughput, throughput_keys

#: Tokens of the prompt that is read before any that is timed.
_FIRST = 1024


class Device:
    """The model and the bandwidth of its device, made when the first rows ask for them."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings

    @cached_property
    def model(self) -> Any:
        return make_model(self.settings)

    @cached_property
    def warm(self) -> float:
        """Seconds that a first prompt takes, kernels chosen on the way."""
        return read_prompt(self.model, Case(_FIRST, FULL, None), self.settings.budgets[0])[0]

    @cached_property
    def bandwidth(self) -> float:
        return copy_bandwidth(torch.device(self.settings.device))

    def facts(self) -> dict[str, Any]:
        """What was really used."""
        computed = vars(self)
        bandwidth = {"bandwidth": self.bandwidth} if "bandwidth" in computed else {}
        return bandwidth | ({"model": model_facts(self.model)} if "model" in computed else {})

    def measure(self, keys: Sequence[BenchKey], tick: Callable[[str], None]) -> Sequence[Row]:
        """The rows of a group of the plan; `tick` is told what is measured."""
        key = keys[0]
        if key.kind == DECODE:
            return Group(self.model, self.settings, keys, self.bandwidth, tick).measure()
        if key.kind == THROUGHPUT:
            return [measure_throughput(self.model, self.settings, key, tick)]
        _ = self.warm
        tick(key.variant)
        case = next(case for case in cases(self.settings) if case.key(self.settings.budgets[0]) == key)
        return [measure_prefill(self.model, self.settings, case)]


def plan(settings: BenchSettings) -> Iterator[list[BenchKey]]:
    """All rows of a run, those together that are measured together."""
    if DECODE in settings.kinds:
        for batch, budget in product(settings.batch_sizes, settings.budgets):
            yield decode_keys(settings, budget, batch)
    if THROUGHPUT in settings.kinds:
        yield from ([key] for key in throughput_keys(settings))
    if PREFILL in settings.kinds:
        yield from ([case.key(settings.budgets[0])] for case in cases(settings))


def run_bench(settings: BenchSettings, output: Path, again: bool, watch: Watch) -> tuple[list[Row], list[str]]:
    """Measure what is not yet in the folder: all rows, and how those of other settings differ.

    Args:
        output: folder of results; a run with the same settings is continued.
        again: forget what the folder holds.
        watch: told of progress.
    """
    folder = ResultFolder(output, {"": settings.as_json()}, row_key, again=again)
    groups, device, started = list(plan(settings)), Device(settings), time.monotonic()
    folder.write_meta({"versions": versions(), "hardware": hardware(1), "complete": False})
    finished, total = 0, sum(map(len, groups))
    for keys in groups:
        if not all(key in folder.rows for key in keys):

            def tell(last: str, finished: int = finished) -> None:
                watch(Progress(finished, total, last))

            tell("model")
            folder.add(device.measure(keys, tell))
            folder.write_meta(device.facts())
            summarise(settings, folder)
        finished += len(keys)
    watch(Progress(total, total))
    folder.write_meta({"complete": True, "seconds": time.monotonic() - started})
    return summarise(settings, folder), settings_differences(folder)


def summarise(settings: BenchSettings, folder: ResultFolder) -> list[Row]:
    """Rows in the order of the plan, written into the file that holds them."""
    rows = [folder.rows[key] for keys in plan(settings) for key in keys if key in folder.rows]
    facts = ("versions", "hardware", "model", "bandwidth")
    environment = {name: folder.meta[name] for name in facts if name in folder.meta}
    write_json(folder.path / SUMMARY, {"environment": environment, "settings": settings.as_json(), "rows": rows})
    return rows


def on_this_machine(settings: BenchSettings) -> BenchSettings:
    """The settings, with what the times depend on."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    installed, place = versions(), hardware(1)
    machine = {
        "device": place["cpu"] if settings.device == "cpu" else [card["name"] for card in place["accelerators"]],
        "torch_threads": place["torch_threads"],
        "commit": commit() or installed["hf_paged_eviction"],
        **{name: installed[name] for name in ("torch", "transformers", "python")},
    }
    return settings.but(machine=machine)

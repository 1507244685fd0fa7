"""A whole benchmark: measured group by group, each written as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..models.environment import commit, hardware, model_facts, versions
from ..progress import Progress, Watch
from ..store.results import SUMMARY, ResultFolder, Row, settings_differences, write_json
from .prefill import Case, cases, measure_prefill, read_prompt
from .rows import BenchKey, row_key
from .settings import BenchSettings
from .shapes import make_model
from .steps.decoding import Group, decode_keys
from .steps.trace import write_trace
from .steps.traffic import copy_bandwidth
from .throughput import measure_throughput, throughput_keys
from .variants import FULL

#: Tokens of the prompt that is read before any that is timed.
_FIRST = 1024


@dataclass(frozen=True)
class Job:
    """Rows that are measured together.

    Attributes:
        keys: of its rows.
        run: measures them, and tells what it is at.
    """

    keys: tuple[BenchKey, ...]
    run: Callable[[Device, Callable[[str], None]], Sequence[Row]]


class Device:
    """The model and the bandwidth of its device, made when the first job asks for them."""

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


@dataclass(frozen=True)
class Report:
    """What a run found."""

    rows: list[Row]
    notes: list[str]


def machine(device: str) -> dict[str, Any]:
    """What the times depend on, for `BenchSettings.machine`."""
    installed, place = versions(), hardware(1)
    accelerators = [card["name"] for card in place["accelerators"]]
    return {
        "device": place["cpu"] if device == "cpu" else accelerators,
        "torch_threads": place["torch_threads"],
        "commit": commit() or installed["hf_paged_eviction"],
        **{name: installed[name] for name in ("torch", "transformers", "python")},
    }


def jobs(settings: BenchSettings) -> list[Job]:
    """All that a run measures."""
    groups = product(settings.batch_sizes, settings.budgets) if settings.contexts else ()
    steps = [_decode_job(settings, budget, batch) for batch, budget in groups]
    steps += [_throughput_job(settings, key) for key in throughput_keys(settings)]
    return steps + [_prefill_job(settings, case) for case in (cases(settings.prefill) if settings.prefill else ())]


def _decode_job(settings: BenchSettings, budget: int, batch: int) -> Job:
    def run(device: Device, tick: Callable[[str], None]) -> Sequence[Row]:
        return Group(device.model, settings, budget, batch, device.bandwidth, tick).measure()

    return Job(tuple(decode_keys(settings, budget, batch)), run)


def _throughput_job(settings: BenchSettings, key: BenchKey) -> Job:
    return Job((key,), lambda device, tick: [measure_throughput(device.model, settings, key, tick)])


def _prefill_job(settings: BenchSettings, case: Case) -> Job:
    key = case.key(settings.budgets[0])

    def run(device: Device, tick: Callable[[str], None]) -> Sequence[Row]:
        tick(key.variant)
        _ = device.warm
        return [measure_prefill(device.model, settings, case)]

    return Job((key,), run)


def run_bench(settings: BenchSettings, output: Path, again: bool, trace: Path | None, watch: Watch) -> Report:
    """Measure what is not yet in the folder.

    Args:
        output: folder of results; a run with the same settings is continued, others are refused.
        again: forget what the folder holds.
        trace: file for a profile of the first group.
        watch: told of progress.
    """
    folder = ResultFolder(output, {"": settings.as_json()}, row_key, again=again)
    _set_threads(settings)
    device, plan, started = Device(settings), jobs(settings), time.monotonic()
    folder.write_meta({"versions": versions(), "hardware": hardware(1), "complete": False})
    finished, total = 0, sum(len(job.keys) for job in plan)
    for job in plan:
        if not all(key in folder.rows for key in job.keys):

            def tell(last: str, finished: int = finished) -> None:
                watch(Progress(finished, total, last))

            tell("model")
            folder.add(job.run(device, tell))
            summarise(settings, folder, device)
        finished += len(job.keys)
    if trace is not None and settings.contexts:
        write_trace(device.model, settings, trace)
    watch(Progress(total, total))
    folder.write_meta({"complete": True, "seconds": time.monotonic() - started, **device.facts()})
    return summarise(settings, folder, device)


def _set_threads(settings: BenchSettings) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


def summarise(settings: BenchSettings, folder: ResultFolder, device: Device) -> Report:
    """Rows in the order of the plan, and the file that holds them."""
    rows = [folder.rows[key] for job in jobs(settings) for key in job.keys if key in folder.rows]
    meta = folder.meta | device.facts()
    environment = {name: meta[name] for name in ("versions", "hardware", "model", "bandwidth") if name in meta}
    write_json(folder.path / SUMMARY, {"environment": environment, "settings": settings.as_json(), "rows": rows})
    return Report(rows, settings_differences(folder))


def at(settings: BenchSettings, device: str) -> BenchSettings:
    """The settings on a device of this machine."""
    _set_threads(settings)
    return settings.but(device=device, machine=machine(device))

"""What the project wants to reach, and whether a run shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..store.results import Row
from .rows import DECODE, MEASURED, THROUGHPUT, UPDATE, measured
from .steps.update import BUDGET, CONTEXT
from .timing import ratio
from .variants import FLOOR, FLOOR_COMPILED, FULL, PAGED, STATIC

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
CPU, H200 = "cpu", "h200"
#: How each set of goals is measured: the whole command, the model and the kind of device.
COMMANDS = {CPU: "paged-eviction bench --preset cpu", H200: "paged-eviction bench --preset h200"}
_NEEDS = {CPU: ("100m", "cpu"), H200: ("llama-3.2-1b", "cuda")}
_128K = 131072
#: In place of a context: the longest of the rows.
LONGEST = -1


#: The number of a goal in the rows of a run; None if they do not have it.
Measure = Callable[[Sequence[Row]], "float | None"]


@dataclass(frozen=True)
class Goal:
    """A number of a run and its limit.

    Attributes:
        text: what is measured.
        limit: to stay at or below, or to reach.
        at_most: which of the two; of several rows the worst counts.
        variants: whose steps; of several, which a user may choose from, the best counts.
        context: of their rows; `LONGEST`: the longest that was measured; None: all.
        batch: of their rows; None: all.
        against: the variant and the context of the row that was timed in turn and that each is divided by.
        inverse: it is divided by each instead.
        column: the number in their rows, where nothing is divided.
        other: what is measured instead of steps.
        unit: "x" for a ratio, "%" for a share.
    """

    text: str
    limit: float
    at_most: bool
    variants: tuple[str, ...] = ()
    context: int | None = None
    batch: int | None = None
    against: tuple[str, int | None] | None = None
    inverse: bool = False
    column: str | None = None
    other: Measure | None = None
    unit: str = "x"

    def measure(self, rows: Sequence[Row]) -> float | None:
        """The number in the rows of a run; None if they do not have it."""
        if self.other is not None:
            return self.other(rows)
        worst, best = (max, min) if self.at_most else (min, max)
        each = [
            [value for row in self._rows(rows, name) if (value := self._value(rows, row)) is not None]
            for name in self.variants
        ]
        return best((worst(values) for values in each if values), default=None)

    def _rows(self, rows: Sequence[Row], variant: str) -> list[Row]:
        found = [row for row in _decoded(rows, variant) if self.batch in (None, row["batch_size"])]
        longest = max((row["context"] for row in found if self.context == LONGEST), default=None)
        wanted = longest if self.context == LONGEST else self.context
        return [row for row in found if wanted in (None, row["context"])]

    def _value(self, rows: Sequence[Row], row: Row) -> float | None:
        if self.against is None:
            value: float | None = row[str(self.column)]
            return value
        other = beside(rows, row, *self.against)
        return step_ratio(other, row) if self.inverse else step_ratio(row, other)


@dataclass(frozen=True)
class Verdict:
    """A goal beside what was measured; `command` measures it where nothing was."""

    goal: str
    limit: str
    value: float | None
    shown: str
    verdict: str
    command: str


def judge(name: str, rows: Sequence[Row], model: str, device: str) -> list[Verdict]:
    """Every goal of a set; without the model and the kind of device that it is about, none of them is measured."""
    fitting = _NEEDS[name] == (model, device.partition(":")[0])
    return [_judge(goal, rows if fitting else (), COMMANDS[name]) for goal in GOALS[name]]


def _judge(goal: Goal, rows: Sequence[Row], command: str) -> Verdict:
    value = goal.measure(rows)
    limit = f"{'<=' if goal.at_most else '>='} {_show(goal.limit, goal.unit, short=True)}"
    if value is None:
        return Verdict(goal.text, limit, None, "", NOT_MEASURED, command)
    fine = value <= goal.limit if goal.at_most else value >= goal.limit
    return Verdict(goal.text, limit, value, _show(value, goal.unit), MET if fine else MISSED, command)


def _show(value: float, unit: str, short: bool = False) -> str:
    if unit == "%":
        return f"{100 * value:.4g} %" if short else f"{100 * value:.2f} %"
    return f"{value:.4g} x" if short else f"{value:.3f} x"


def _decoded(rows: Sequence[Row], variant: str) -> list[Row]:
    return [row for row in rows if row["kind"] == DECODE and row["variant"] == variant and row["status"] == MEASURED]


def step_ratio(of: Row | None, to: Row | None) -> float | None:
    """Step times of two rows of one group, round by round."""
    if of is None or to is None or len(of["rounds_ms"]) != len(to["rounds_ms"]):
        return None
    return ratio(of["rounds_ms"], to["rounds_ms"])


def beside(rows: Sequence[Row], row: Row, variant: str, context: int | None) -> Row | None:
    """The row of another variant that was timed in turn with this one."""
    return measured(rows, DECODE, variant, context, row["budget"], row["batch_size"])


def _update_speedup(rows: Sequence[Row]) -> float | None:
    full, paged = (measured(rows, UPDATE, name, CONTEXT, BUDGET, 1) for name in (FULL, PAGED))
    return None if full is None or paged is None else ratio(full["rounds_us"], paged["rounds_us"])


def _throughput_ratio(rows: Sequence[Row]) -> float | None:
    """The faster of the eager and the static cache against the full one."""
    found = {row["variant"]: row for row in rows if row["kind"] == THROUGHPUT and row["status"] == MEASURED}
    sizes = {(row["input_tokens"], row["output_tokens"], row["requests"]) for row in found.values()}
    rates: list[Any] = [found[name]["tokens_per_second"] for name in (PAGED, *STATIC) if name in found]
    if sizes != {(1024, 8192, 64)} or not rates or FULL not in found:
        return None
    return float(max(rates) / found[FULL]["tokens_per_second"])


_FLOOR = "static step / floor compiled the same way, batch {}"
_LIMIT = "static step, share of the bandwidth limit, batch {}"
_LONG = "full DynamicCache / static step at 128k, batch 1"
_UPDATE = "update: DynamicCache at 4k / this cache at 2k, 8 KV heads of 128"
_WHOLE = "throughput, 1,024 in and 8,192 out: this cache / full"
GOALS: dict[str, tuple[Goal, ...]] = {
    CPU: (
        Goal(
            "step of this cache at budget C / floor of C tokens", 1.02, True, (PAGED,), LONGEST, against=(FLOOR, None)
        ),
        Goal("step of this cache, context 32k / 2k", 1.05, True, (PAGED,), 32768, against=(PAGED, 2048)),
        Goal("time of the step in choosing victims", 0.01, True, (PAGED,), column="eviction_share", unit="%"),
        Goal(_UPDATE, 50, False, other=_update_speedup),
    ),
    H200: (
        *(Goal(_FLOOR.format(n), 1.0, True, STATIC, LONGEST, n, against=(FLOOR_COMPILED, None)) for n in (1, 32)),
        *(Goal(_LIMIT.format(n), 0.6, False, STATIC, batch=n, column="bandwidth_share", unit="%") for n in (1, 32)),
        Goal(_LONG, 10, False, STATIC, _128K, 1, against=(FULL, _128K), inverse=True),
        Goal(_WHOLE, 3, False, other=_throughput_ratio),
    ),
}

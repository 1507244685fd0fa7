"""Files of predictions in one shape: of this package (`rows.*.jsonl`), of LongBench's `pred.py`, of LongBench v2."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, InstanceOf
from typing_extensions import NotRequired, TypedDict

from ..data.longbench import v2
from ..data.longbench.tasks import TASKS, LongBenchTask
from ..data.records import COUNT, TEXT, Located, Record, checked, json_lines
from ..data.sources import read_source
from ..errors import UserError
from ..metrics.thinking import without_thinking
from .results import ROWS, of_last, read_runs

Lines = Sequence[tuple[str, Record]]
"""Rows, each with its file and line."""


@dataclass(frozen=True)
class Prediction:
    """One answer of a model, and what it is scored by.

    Attributes:
        place: file and line, for messages.
        text: as generated; in rows of this package without the thinking.
        words: the `length` field of the LongBench record.
        metric: see `metrics.score_sample`; None where the row names none.
        recorded: the score that stands in the file; None in files of `pred.py`.
        metadata: of the sample.
    """

    place: str
    text: str
    answers: tuple[str, ...]
    metric: str | None
    all_classes: tuple[str, ...] | None = None
    words: int | None = None
    recorded: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Predictions that have one score: of one task and, in rows of this package, of one length, policy and budget.

    Attributes:
        source: the file, or the folder of a run.
        longbench: the task's rules, if it is one of LongBench.
        repeated: lines that are equal to an earlier one.
        left_out: lines of later runs.
    """

    source: Path
    task: str
    predictions: tuple[Prediction, ...]
    longbench: LongBenchTask | None = None
    policy: str | None = None
    budget: str | None = None
    length: int | None = None
    repeated: int = 0
    left_out: int = 0


#: What the lines of each kind of file have to hold. An answer may end in half a character, so any `str` is text here.
_STRING = InstanceOf[str]
_STRINGS = Annotated[list[_STRING], Field(min_length=1)]
_CLASSES = list[_STRING] | None
_SCORE = Annotated[float, Field(ge=0, le=1)] | None


class _OfPred(TypedDict):
    pred: _STRING
    answers: _STRINGS
    all_classes: NotRequired[_CLASSES]
    length: NotRequired[COUNT | None]


class _Own(TypedDict):
    task: TEXT
    length: COUNT | None
    policy: TEXT
    budget: TEXT
    id: _STRING
    prediction: _STRING
    answers: _STRINGS
    metric: _STRING | None
    metadata: dict[str, Any]
    all_classes: NotRequired[_CLASSES]
    record_length: NotRequired[COUNT | None]
    score: NotRequired[_SCORE]
    thinking: NotRequired[_STRING | None]


class _V2(TypedDict):
    _id: _STRING
    answer: _STRING
    judge: bool | int
    difficulty: _STRING
    length: _STRING
    response: NotRequired[_STRING | None]
    pred: NotRequired[_STRING | None]


def read_groups(files: Sequence[Path], longbench_e: bool, keep_first_run: bool = False) -> list[Group]:
    """Groups of predictions in files that belong together, in the order of the lines.

    Args:
        files: of `runs`.
        longbench_e: a name of a LongBench task means that of LongBench-E, as it does in a folder `pred_e` (or one
            level below) anyway.
        keep_first_run: of a file of `pred.py` with more lines than its task has samples, the first ones count.

    Raises:
        UserError: nothing is there, a line is damaged or repeated, or a task is unknown.
    """
    lines = [
        (where, checked((where, row), "predictions", dict[str, Any])) for file in files for where, row in _read(file)
    ]
    if not lines:
        raise UserError(f"{files[0]} holds no predictions: the file is empty")
    first, row = lines[0]
    if {"judge", "difficulty"} <= row.keys():
        return [_official_v2(files[0], lines)]
    if "pred" in row:
        return [_official(files[0], lines, longbench_e, keep_first_run)]
    if not {"task", "prediction"} & row.keys() or "loss" in row:
        raise UserError(f"{first} is no prediction: a row has a field 'prediction', or 'pred' if pred.py wrote it")
    folder = files[0].parent
    if not files[0].match(ROWS):
        raise UserError(
            f"{files[0]} is no file of LongBench: predictions of this package are read where a run wrote {ROWS}"
        )
    return list(_own(folder, _asked(folder, lines), longbench_e))


def _read(path: Path) -> Iterator[Located]:
    content = read_source(path)
    whole, _, last = content.rpartition(b"\n")
    if path.match(ROWS) and last.startswith(b"{") and not last.endswith(b"}"):  # of a process that died
        content = whole
    return json_lines(str(path), content.split(b"\n"))


def _asked(folder: Path, lines: Lines) -> Lines:
    """Those that have the settings of the last command in this folder, each row once."""
    is_asked = of_last(read_runs(folder)[0])
    names = ("task", "length", "policy", "budget", "id")
    newest = {json.dumps([row.get(name) for name in names]): (where, row) for where, row in lines if is_asked(row)}
    return list(newest.values())


def runs(path: Path) -> list[list[Path]]:
    """The files in groups: the files of one run of this package together, every other file by itself.

    Args:
        path: a file, a folder of a run, a folder of files of `pred.py`, one per task and named after it, or a folder
            of such folders, one per model.

    Raises:
        UserError: nothing is there.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: give files of predictions or the folders that hold them")
    file_groups = _of_folder(path) if path.is_dir() else [[path]]
    if not file_groups:
        file_groups = [files for folder in sorted(path.iterdir()) if folder.is_dir() for files in _of_folder(folder)]
    if not file_groups:
        raise UserError(f"{path} holds no predictions: no .jsonl file, here or one level below")
    return file_groups


def _of_folder(folder: Path) -> list[list[Path]]:
    rows = sorted(folder.glob(ROWS))
    return [rows] if rows else [[file] for file in sorted(folder.glob("*.jsonl"))]


def _official(path: Path, lines: Lines, longbench_e: bool, keep_first_run: bool) -> Group:
    in_e = longbench_e or "pred_e" in (path.absolute().parent.name, path.absolute().parent.parent.name)
    task = _task(path.stem, in_e)
    if task is None:
        known = ", ".join(name for name, task in TASKS.items() if not task.is_e)
        raise UserError(f"{path}: a file of predictions has the name of its task; the tasks are: {known}")
    read = len(lines)
    lines = lines[: task.samples] if keep_first_run else lines
    repeated = _refuse_second_run(path, lines, task)
    predictions = [_unscored(line, task) for line in lines]
    return Group(path, task.name, tuple(predictions), task, repeated=repeated, left_out=read - len(lines))


def _unscored(line: Located, task: LongBenchTask) -> Prediction:
    row = checked(line, "pred.py", _OfPred)
    return Prediction(line[0], row["pred"], tuple(row["answers"]), task.metric, _classes(row), row.get("length"))


def _classes(row: Record) -> tuple[str, ...] | None:
    return tuple(row.get("all_classes") or ()) or None


def _official_v2(path: Path, lines: Lines) -> Group:
    """A result file of LongBench v2."""
    seen: dict[str, str] = {}
    predictions = []
    for place, row in lines:
        checked((place, row), "LongBench v2", _V2)
        if (first := seen.setdefault(row["_id"], place)) != place:
            raise UserError(f"{place} repeats the question of {first}; delete one of them")
        kinds = {name: row[name] for name in ("difficulty", "length")}
        predictions.append(
            Prediction(
                place,
                _response(row),
                (row["answer"],),
                "multiple_choice",
                recorded=float(row["judge"]),
                metadata=kinds,
            )
        )
    return Group(path, v2.NAME, tuple(predictions))


def _response(row: Record) -> str:
    """What the model said; where only the letter was kept, a sentence that says it."""
    if row.get("response") is not None:
        return str(row["response"])
    return f"The correct answer is ({row['pred']})" if row.get("pred") else ""


def _task(name: str, in_e: bool) -> LongBenchTask | None:
    """The task of LongBench, or of LongBench-E; None for any other."""
    if name in TASKS and in_e and not TASKS[name].is_e and f"{name}_e" not in TASKS:
        raise UserError(f"task {name!r} is not one of LongBench-E")
    return TASKS.get(f"{name}_e" if in_e and not name.endswith("_e") else name)


def _refuse_second_run(path: Path, lines: Lines, task: LongBenchTask) -> int:
    """How many lines repeat an earlier one. `pred.py` writes no id, so a few may be equal by chance.

    Raises:
        UserError: more than one in fifty does, or the task has fewer samples: `pred.py` appends to the file of an
            earlier run.
    """
    first: dict[str, str] = {}
    numbers = [where.rpartition(" ")[2] for where, _ in lines]
    places = [(at, first.setdefault(json.dumps(row), at)) for at, (_, row) in zip(numbers, lines, strict=True)]
    repeated = [(number, earlier) for number, earlier in places if number != earlier]
    why = (
        "pred.py appends to the file of an earlier run, so these are probably several runs: keep the lines of one, or "
        "say --keep-first-run"
    )
    if len(repeated) > len(lines) // 50:
        shown = ", ".join(f"{number} (as {earlier})" for number, earlier in repeated[:5])
        more = ", ..." if len(repeated) > 5 else ""
        raise UserError(
            f"{path}: {len(repeated)} of {len(lines)} lines repeat an earlier one: lines {shown}{more}; {why}"
        )
    if len(lines) > task.samples:
        raise UserError(f"{path} has {len(lines)} lines, but {task.name} {task.samples} samples; {why}")
    return len(repeated)


def _own(source: Path, lines: Lines, longbench_e: bool) -> Iterator[Group]:
    groups: dict[tuple[str, int | None, str, str], list[Prediction]] = {}
    for place, row in lines:
        checked((place, row), "this package", _Own)
        group = (row["task"], row["length"], row["policy"], row["budget"])
        groups.setdefault(group, []).append(_own_prediction(place, row))
    for (task, length, policy, budget), predictions in groups.items():
        rules = _task(task, longbench_e)
        if rules is None and longbench_e:
            raise UserError(f"{source}: task {task!r} is not one of LongBench-E")
        name = rules.name if rules else task
        yield Group(source, name, tuple(predictions), rules, policy, budget, length)


def _own_prediction(place: str, row: Record) -> Prediction:
    text = row["prediction"]
    text = text if row.get("thinking") is None else without_thinking(text, opened=True)[0]
    more = {"words": row.get("record_length"), "recorded": row.get("score"), "metadata": row["metadata"]}
    return Prediction(place, text, tuple(row["answers"]), row["metric"], _classes(row), **more)
